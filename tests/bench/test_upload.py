"""Run the upload bench against a real server at toy size."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from bench.sink import receive
from bench.upload import main


@pytest.mark.deploy
def test_a_small_run_uploads_beside_streams_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "upload.json"
    main(["--small", "--repeats", "1", "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    document = json.loads(text)
    results = document["results"]
    assert results["bytes"] > 1 << 20
    assert {name: len(seconds) for name, seconds in results["seconds"].items()} == {
        "curl into a file": 1,
        "upload to the server": 1,
    }
    assert all(gaps["count"] > 0 for gaps in results["gaps"].values())
    assert [goal["limit"] for goal in document["goals"]] == ["at most 1.2", "at least 0.5", "at most 64"]
    printed = capsys.readouterr().out
    assert "| upload to the server " in printed
    assert str(tmp_path) not in text + printed


def test_the_sink_writes_the_body_that_it_is_sent(tmp_path: Path) -> None:
    body = bytes(range(256)) * 8192
    ours, theirs = socket.socketpair()
    with ours, theirs:
        receiver = threading.Thread(target=receive, args=(theirs, tmp_path / "body"))
        receiver.start()
        ours.sendall(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:100])
        ours.sendall(body[100:])
        assert ours.recv(4096).startswith(b"HTTP/1.1 201 ")
        receiver.join()
    assert (tmp_path / "body").read_bytes() == body
