"""Run the bench of a hostile tenant against a real server at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.hostile.__main__ import main

KINDS = ("growing-normalizer", "long-prompts", "large-schemas")


@pytest.mark.deploy
def test_attacks_are_answered_and_the_honest_text_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hostile.json"
    main(["--small", "--attacks", *KINDS, "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    found = {one["attack"]: one for one in json.loads(text)["results"]}
    assert tuple(found) == KINDS
    assert all(one["same_text"] and one["replies"] for one in found.values())
    assert set(found["long-prompts"]["replies"]) == {"400 invalid_request"}
    printed = capsys.readouterr().out
    assert "| large-schemas " in printed
    assert str(tmp_path) not in text + printed
