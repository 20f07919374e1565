"""The runbook has a section per alert, and the commands, flags, metrics and thresholds that it names exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import pytest
import yaml
from typer.main import get_group

from docs.reference import reference
from peraxis.cli import COMMANDS
from tests.monitoring.helpers.check import known_series
from tests.monitoring.helpers.files import ALERTS, ROOT, THRESHOLDS

DOCS = ROOT / "docs" / "deploy"
RUNBOOK, MONITORING = ((DOCS / name).read_text() for name in ("runbook.md", "monitoring.md"))
PARTS = ("Meaning", "Impact", "First checks", "Remedies")
# Meaning, name and default.
DEFAULTS = re.findall(r"^# (.+)\n(\w+): (.+)$", THRESHOLDS.read_text(), re.MULTILINE)
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE))


def code(text: str) -> list[str]:
    """Return each command line of the code blocks, and each piece of code in the text."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.partition(" #")[0] for block in blocks for line in block.splitlines()] + spans


def options_of(words: list[str]) -> set[str]:
    """Return the options that a command line's command takes."""
    entry = COMMANDS[words[1]]
    name = words[2] if entry.is_group else words[1]
    command = get_group(importlib.import_module(entry.module).app).commands[name]
    return {option for parameter in command.params for option in parameter.opts}


def command_lines() -> Iterator[list[str]]:
    for text in (RUNBOOK, MONITORING):
        for line in code(text):
            if line.startswith("peraxis ") and "=" not in line:
                yield line.split()


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    assert list(SECTIONS) == list(ALERTS)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_an_alert_means_costs_and_needs(name: str) -> None:
    assert re.findall(r"^\*\*([^.]+)\.\*\*", SECTIONS[name], re.MULTILINE) == list(PARTS)


def test_every_command_exists_and_takes_its_options() -> None:
    lines = list(command_lines())
    assert len(lines) > 20
    for words in lines:
        named = {word for word in words if word.startswith("--")}
        assert named <= options_of(words), words


def test_every_flag_metric_and_threshold_exists() -> None:
    flags = set(re.findall(r"`(--[a-z-]+)`", reference()))
    series = {name.removesuffix("_count") for name in known_series()} | set(known_series())
    thresholds = {name for _, name, _ in DEFAULTS}
    for text in (RUNBOOK, MONITORING):
        pieces = code(text)
        assert {piece for piece in pieces if re.fullmatch(r"--[a-z-]+", piece)} <= flags | {"--previous"}
        assert set(re.findall(r"\bperaxis_[a-z_]+", text)) <= series
        assert {piece for piece in pieces if re.fullmatch(r"[a-z]+([A-Z][a-z]+)+", piece)} <= thresholds


def test_links_lead_to_sections_and_files() -> None:
    anchors = {name.lower() for name in ALERTS}
    assert set(re.findall(r"\(#([a-z]+)\)", RUNBOOK)) <= anchors
    for text in (RUNBOOK, MONITORING):
        for path in re.findall(r"\]\(([^)#]+)", text):
            assert (DOCS / path).exists(), path


def test_the_tables_of_alerts_and_thresholds_are_those_of_the_files() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", MONITORING, re.MULTILINE)
    alerts = {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}
    assert len(DEFAULTS) == len(yaml.safe_load(THRESHOLDS.read_text()))
    assert dict(rows) == {**alerts, **{name: default for _, name, default in DEFAULTS}}
    for meaning, name, default in DEFAULTS:
        assert f"| `{name}` | {default} | {meaning} |" in MONITORING
