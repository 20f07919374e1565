"""Run the bench of hostile tenants, pages and clients against a real server at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.hostile.__main__ import main
from bench.hostile.attacks import KINDS


@pytest.mark.deploy
def test_every_attack_is_answered_and_no_honest_call_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hostile.json"
    main(["--small", "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    found = {one["attack"]: one for one in json.loads(text)["results"]}
    assert tuple(found) == KINDS
    for one in found.values():
        assert one["same_text"], one
        assert one["replies"], one
        assert one["honest_refused"] == {}, one
        assert one["memory_bytes"]["engine"]["peak"] > 0
    assert set(found["cross-site-page"]["replies"]) == {"403 forbidden"}
    assert set(found["json-values"]["replies"]) == {"400 invalid_request"}
    printed = capsys.readouterr().out
    assert "| large-schemas " in printed
    assert str(tmp_path) not in text + printed
