"""Environments of stock clients, made from pinned hashes and kept in `.clients` of the checkout, which git ignores."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / ".clients"
PINS = Path(__file__).resolve().parents[1] / "environments"


def made(name: str) -> Path:
    """Return an environment's directory, which is made anew when its pins or this Python have changed."""
    directory, pins = KEPT / name, PINS / name
    wanted = "\n".join([sys.version, *(path.read_text() for path in sorted(pins.iterdir()))])
    KEPT.mkdir(exist_ok=True)
    ready = directory / ".made-from"
    with (KEPT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != wanted:
            shutil.rmtree(directory, ignore_errors=True)
            if (pins / "package-lock.json").exists():
                _make_node(pins, directory)
            else:
                _make_python(pins, directory)
            ready.write_text(wanted)
    return directory


def _make_python(pins: Path, directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    install = [
        str(directory / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    pinned = ["--only-binary", ":all:", "--require-hashes", "-r", str(pins / "requirements.txt")]
    subprocess.run([*install, *pinned], check=True)


def _make_node(pins: Path, directory: Path) -> None:
    directory.mkdir()
    for path in pins.iterdir():
        shutil.copy(path, directory)
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=directory, check=True)
