"""Text is handled without torch, and a process that has torch keeps it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVICE = "import sys, server.text.without_torch, server.text.service, server.text.detokenizer"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_text_service_imports_no_torch_and_says_nothing() -> None:
    done = run(f"{SERVICE}; sys.exit('torch' in sys.modules)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_torch_can_still_be_imported_afterwards() -> None:
    done = run(f"{SERVICE}; import torch; sys.exit(torch.ones(1).item() != 1)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["import torch", "import torch; import transformers"])
def test_a_process_that_has_torch_keeps_its_models(first: str) -> None:
    program = f"{first}; import server.text.without_torch; from transformers import LlamaForCausalLM"
    done = run(f"{program}; LlamaForCausalLM.forward")
    assert done.returncode == 0, done.stderr
