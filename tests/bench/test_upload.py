"""Run the upload bench against a real server at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.upload import main


def test_a_small_run_uploads_over_http_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "upload.json"
    main(["--small", "--repeats", "1", "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    results = json.loads(text)["results"]
    assert results["bytes"] > 1 << 20
    assert min(results[key] for key in ("sha256sum_s", "check_s", "upload_s")) >= 0
    printed = capsys.readouterr().out
    assert f"{results['upload_s']:.3f}" in printed
    assert str(tmp_path) not in text + printed
