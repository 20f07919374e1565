"""The programs in examples/ that talk to a server do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, make_pair, make_tokenizer
from tests.server.helpers.live_server import LiveServer, live_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    change = Change(chat_template=CHAT_TEMPLATE, noise=0.2)
    made = make_pair("llama", tmp_path_factory.mktemp("models"), changes=(change,))
    make_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(made.base)
    return made


def ran(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command: list[str] = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_pipeline_publishes_what_is_near_enough_and_nothing_else(
    models: TinyModels, tmp_path: Path
) -> None:
    with live_server(models.base, tmp_path / "registry") as server:
        pair = models.base, models.finetunes[0], "my", server.url
        refused = ran("publish.py", *pair, 1.0, 4)
        assert refused.returncode != 0
        assert refused.stderr.splitlines()[-1].startswith("not published: ")
        assert "min_agreement" in refused.stderr.splitlines()[-1]
        assert versions(server) == {}

        published = ran("publish.py", *pair, 0.0, 4)
        assert (published.returncode, published.stderr) == (0, "")
        assert published.stdout.splitlines()[-1] == "my answers as version 1"
        assert versions(server) == {"my": 1}

        compared = ran("compare.py", server.url, "my", "base", "Hello", "One two")
        assert (compared.returncode, compared.stderr) == (0, "")
        assert [line for line in compared.stdout.splitlines() if line.startswith(("'Hello'", "'One two'"))]
        assert "  my: " in compared.stdout
        same = ran("compare.py", server.url, "my", "my@1", "Hello")
        assert "  my" not in same.stdout


def versions(server: LiveServer) -> dict[str, int | None]:
    """Return the active version of each variant."""
    return {
        variant["name"]: variant["active"] for variant in server.client.get("/variants").json()["variants"]
    }
