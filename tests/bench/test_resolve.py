"""Run the bench of resolutions with few versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.registry.resolve import SMALL_SCOPE, main, make_registries


def test_a_small_run_asks_every_registry_every_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "resolve.json"
    main(["--small", "--dir", str(tmp_path), "--out", str(out)])
    registries = json.loads(out.read_text())["results"]
    kinds = ["few", "300 versions", "150 inactive", "150 deleted", "150 scattered", "300 elsewhere"]
    assert list(registries) == kinds
    for costs in registries.values():
        assert list(costs) == ["resolve", "page", "scrape"]
        assert all(min(cost["names_s"], cost["rest_s"]) > 0 for cost in costs.values())
    assert "| 150 deleted " in capsys.readouterr().out


def test_its_registries_are_as_publications_and_deletions_leave_them(tmp_path: Path) -> None:
    for kind, registry in make_registries(tmp_path, SMALL_SCOPE).items():
        # Objects are not written.
        problems = [finding.problem for finding in registry.check().findings]
        assert all(problem.startswith("its object") for problem in problems), (kind, problems)
        variant = registry.summary("acme", "a")
        expected = {"300 versions": 300, "150 inactive": 1, "150 deleted": 160, "150 scattered": 160}.get(
            kind, 10
        )
        assert variant.active == expected
        assert registry.stored("acme").num_versions_of("a") == variant.num_versions
