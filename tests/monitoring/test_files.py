"""The files that Prometheus, Grafana and the chart read are those that the source makes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from monitoring import __main__ as command
from monitoring.alerts.alert import PLACEHOLDER
from monitoring.alerts.definitions import ALERTS
from monitoring.alerts.rules import (
    CHART_MATCHERS,
    DEFAULT_VALUES,
    chart_rules,
    chart_thresholds,
    default_rules,
)
from monitoring.alerts.thresholds import THRESHOLDS
from monitoring.files import ROOT, files

VALUE = re.compile(r"\{\{ \.Values\.([\w.]+) \}\}")


@pytest.mark.parametrize("path", files(), ids=str)
def test_a_file_is_what_the_source_says(path: Path) -> None:
    assert (ROOT / path).read_text() == files()[path], "run `make monitoring`"


def test_the_check_of_make_check_passes() -> None:
    arguments = [sys.executable, "-m", "monitoring", "--check"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_chart_with_the_default_values_has_the_default_rules() -> None:
    """Evaluate the template as Helm does: matchers, values, and literals in backticks."""
    text = chart_rules().replace(CHART_MATCHERS, DEFAULT_VALUES["matchers"])
    text = VALUE.sub(lambda match: DEFAULT_VALUES[match[1].rpartition(".")[2]], text)
    text = re.sub(r"\{\{ `(.*?)` \}\}", r"\1", text)
    assert yaml.safe_load(text) == yaml.safe_load(default_rules())["groups"]


def test_each_threshold_is_used_and_has_a_default_that_the_chart_reads() -> None:
    names = {
        name for alert in ALERTS for name in PLACEHOLDER.findall(alert.expression + alert.lasting.placeholder)
    }
    assert names - {"matchers"} == {threshold.name for threshold in THRESHOLDS}
    assert yaml.safe_load(chart_thresholds()) == {each.name: each.default for each in THRESHOLDS}


def test_the_check_names_an_unknown_metric_and_an_old_file_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Path("monitoring/generated/rules.yaml")
    monkeypatch.setattr(command, "expressions", lambda: [("A panel", "sum(peraxis_nothing_total)")])
    monkeypatch.setattr(command, "files", lambda: {old: "another text"})
    with pytest.raises(typer.Exit) as ended:
        command.main(check=True)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.splitlines() == [
        "A panel: no server has peraxis_nothing_total",
        f"{old} is not what the source says: run `make monitoring`",
    ]
