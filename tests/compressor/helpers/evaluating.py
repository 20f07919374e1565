"""Helpers for tests of `peraxis eval`: one tiny pair with its delta and text, and the command's output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compressor.config import CompressConfig
from compressor.pipeline import compress
from peraxis.cli import run
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, make_pair

SENTENCE = "The quick brown fox <added-1>jumps over the lazy dog, {} times. "


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A pair, its delta and held-out text."""

    models: TinyModels
    delta: Path
    text: Path

    def args(self, **instead: Any) -> list[str]:
        """The command line, with other values for some options."""
        options = {
            "base": self.models.base,
            "finetune": self.models.finetunes[0],
            "delta": self.delta,
            "text": self.text,
            "samples": 4,
            **instead,
        }
        return ["eval", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def make_evaluated(directory: Path, architecture: str = "llama", **change: Any) -> Evaluated:
    """The fine-tune adds two tokens, which the text uses, and is followed by another of the same shapes."""
    wanted = Change(**{"added_tokens": 2, "chat_template": CHAT_TEMPLATE, **change})
    models = make_pair(architecture, directory, changes=(wanted, Change(added_tokens=2), Change()))
    text = directory / "text.txt"
    text.write_text("".join(SENTENCE.format(number) for number in range(100)))
    delta = directory / "delta.safetensors"
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), delta))
    return Evaluated(models, delta, text)


def document(args: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """Run the command with --json and return its document; stderr must stay empty."""
    capsys.readouterr()  # what making the models wrote
    assert run([*args, "--json", "--no-progress"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)
