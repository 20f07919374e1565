"""The shape of the repository: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "deltastore": set[str](),
    "compressor": {"deltastore"},
    "server": {"deltastore"},
    "demo": {"deltastore", "compressor"},
}
LAYERS = ["kernels", "deltas", "model", "text", "engine", "api"]  # inside server, the lowest first
ABOVE_LAYERS = {"app", "cli", "process", "__main__"}
MAX_LINES = 400


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_names(source: str, module: str) -> set[str]:
    """Every dotted name that `source`, the text of `module`, imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*above, *filter(None, [node.module])])
            names.update(f"{parent}.{alias.name}" for alias in node.names)
    return names


def imports_of(path: Path) -> set[str]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return imported_names(path.read_text(), ".".join(parts))


def server_layer(name: str) -> str | None:
    """The part of server that a dotted name lies in; None for a name outside."""
    parts = name.split(".")
    return parts[1] if parts[0] == "server" and len(parts) > 1 else None


def may_import(importer: str, imported: str) -> bool:
    """True for a lower layer; and for modules beside the layers, which all but kernels may import."""
    if importer == imported or importer in ABOVE_LAYERS:
        return True
    if importer in LAYERS and imported in LAYERS:
        return LAYERS.index(imported) < LAYERS.index(importer)
    return imported not in {*LAYERS, *ABOVE_LAYERS} and importer != "kernels"


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from .e import g\n    from . import h\n"
    assert imported_names(source, "server.engine.request") == {
        "a.b",
        "c.d",
        "server.engine.e.g",
        "server.engine.h",
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_it_may(package: str) -> None:
    forbidden = {*PACKAGES, "bench", "tests", "peraxis"} - PACKAGES[package] - {package}
    found = {
        (path.name, name)
        for path in python_files(package)
        for name in imports_of(path)
        if name.split(".")[0] in forbidden
    }
    assert not found


def test_only_the_app_and_the_api_know_the_web_framework() -> None:
    files = [*python_files(*PACKAGES, "bench"), ROOT / "peraxis.py"]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if any(name.split(".")[0] in {"fastapi", "starlette"} for name in imports_of(path))
    }
    assert all(name == "server/app.py" or name.startswith("server/api/") for name in found), found


def test_inside_the_server_no_layer_imports_a_higher_one() -> None:
    found = set()
    for path in python_files("server"):
        importer = path.relative_to(ROOT / "server").with_suffix("").parts[0]
        layers = {layer for name in imports_of(path) if (layer := server_layer(name))}
        found |= {(path.name, layer) for layer in layers if not may_import(importer, layer)}
    assert not found


def test_the_registry_side_of_deltastore_needs_no_torch() -> None:
    registry = [path for path in python_files("deltastore/registry") if path.stem != "__init__"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in registry]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    files = [*python_files(*PACKAGES, "bench", "tests"), ROOT / "peraxis.py"]
    too_long = {path.name: n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not too_long
