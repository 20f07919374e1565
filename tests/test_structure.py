"""Check the structure of the repository: imports, sizes, names, docstrings and assertions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "deltastore": set[str](),
    "compressor": {"deltastore"},
    "server": {"deltastore"},
    "client": {"deltastore"},
    # The command line, whose modules import other packages when a command of theirs runs.
    "peraxis": {"deltastore", "compressor", "client", "server"},
    "peraxis/demo": {"deltastore", "compressor", "peraxis"},
}
# The engine process and the HTTP process, the lowest layer first. Neither imports a layer of the other.
ENGINE_LAYERS = ["kernels", "deltas", "model", "engine"]
HTTP_LAYERS = ["workers", "text", "grammar", "publishing", "api"]
LAYERS = {*ENGINE_LAYERS, *HTTP_LAYERS}
# Parts that know layers of both, or all of one.
ABOVE_LAYERS = {"app", "check", "cli", "http_process", "inline", "scale", "supervisor"}
MAX_LINES = 700
# Modules of a room of server/ at most, and of every room that is not named. A change that needs one more raises it.
MAX_MODULES = {"server": 17, "server/api": 20, "server/engine": 15, "server/kernels": 11}
MAX_MODULES_ELSEWHERE = 10
# A file shorter than this joins the only module that imports it.
SHORT_LINES = 100
# Those that do not, and why.
SHORT_ALONE = {
    "peraxis.demo.page_cache": "benches use it, which measure no demo",
    "server.api.operations": "routes, which app.py mounts and does not define",
    "server.api.console": "routes, which app.py mounts and does not define",
    "server.scale.ingress": "a deployment, which app.py binds to others and Ray runs in processes of its own",
}
# Packages of extras, and the modules that may need them.
EXTRAS = {"triton", "lm_eval", "datasets", "peft", "ray", "obstore", "opentelemetry"}
NEED_EXTRAS = (
    "deltastore.registry.bucket.", "server.kernels.attention_cuda", "server.kernels.onebit_cuda", "server.scale.",
    "server.tracing",
)  # fmt: skip
OPENINGS = ("Of ", "What ", "Who ", "Where ", "Whether ", "See the module")
# The fields of nodes of a syntax tree that hold statements, or handlers and cases, which hold statements.
BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about one file that tests check, in place of its syntax tree, which takes many times the memory."""

    imports: frozenset[str]  # dotted names that it imports anywhere, also inside functions
    imports_at_start: frozenset[str]  # those that it imports when it is imported, and not for types alone
    checking_asserts: tuple[int, ...]  # lines of assertions that do more than narrow a type
    fragments: tuple[int, ...]  # lines of definitions whose docstring opens with a fragment


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def production_files() -> list[Path]:
    return python_files(*PACKAGES, "bench", "vllm_plugin")


def all_files() -> list[Path]:
    return [*production_files(), *python_files("tests")]


def module_name(path: Path) -> str:
    """The dotted name of a file; a package's is that of its folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def statements(tree: ast.Module) -> list[ast.AST]:
    """Return a module, and every statement, handler and case in it at any depth. Expressions hold no statements."""
    found: list[ast.AST] = [tree]
    # It grows while it is walked.
    for node in found:
        for field in BLOCKS:
            found += getattr(node, field, ())
    return found


def imported_names(nodes: Iterable[ast.AST], module: str) -> frozenset[str]:
    """Return every dotted name that statements of `module` import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*above, *filter(None, [node.module])])
            names.update(f"{parent}.{alias.name}" for alias in node.names)
    return frozenset(names)


@cache
def facts_of(path: Path) -> Facts:
    """Parse a file, once for all tests."""
    tree = ast.parse(path.read_text())
    nodes, module = statements(tree), ".".join(path.relative_to(ROOT).with_suffix("").parts)
    asserts = [node for node in nodes if isinstance(node, ast.Assert) and not narrows_a_type(node.test)]
    fragments = [
        node
        for node in nodes
        if isinstance(node, DOCUMENTED) and (ast.get_docstring(node) or "").startswith(OPENINGS)
    ]
    return Facts(
        imported_names(nodes, module),
        imported_names(tree.body, module),
        tuple(node.lineno for node in asserts),
        # A module has no line of its own.
        tuple(getattr(node, "lineno", 1) for node in fragments),
    )


def imports_of(path: Path) -> frozenset[str]:
    return facts_of(path).imports


def modules_of(names: Collection[str], modules: Collection[str]) -> set[str]:
    """Return the modules that are imported by dotted names, some of which name a part of a module."""
    return {name if name in modules else name.rpartition(".")[0] for name in names} & set(modules)


def server_layer(name: str) -> str | None:
    """Return the layer or module of server that a dotted name lies in; None for a name outside."""
    parts = name.split(".")
    return parts[1] if parts[0] == "server" and len(parts) > 1 else None


def may_import(importer: str, imported: str) -> bool:
    """True for lower layers, and for modules beside the layers, which all but kernels may import."""
    if importer == imported or importer in ABOVE_LAYERS:
        return True
    for layers in (ENGINE_LAYERS, HTTP_LAYERS):
        if importer in layers and imported in layers:
            return layers.index(imported) < layers.index(importer)
    return imported not in {*LAYERS, *ABOVE_LAYERS} and importer != "kernels"


def test_every_statement_is_seen() -> None:
    source = """
class A:
    async def f(self):
        for a in b:
            while c:
                if d:
                    import in_if
                elif e:
                    import in_elif
                else:
                    import in_else
            else:
                import behind_while
        else:
            import behind_for
        async for a in b:
            async with g:
                with h:
                    import in_with
        match i:
            case 0:
                try:
                    import in_try
                except J:
                    import in_except
                else:
                    import behind_try
                finally:
                    import in_finally
"""
    tree = ast.parse(source)
    found = statements(tree)
    assert {*found} >= {node for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    assert len(imported_names(found, "module")) == source.count("import ")


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from .e import g\n    from . import h\n"
    assert imported_names(statements(ast.parse(source)), "server.engine.request") == {
        "a.b",
        "c.d",
        "server.engine.e.g",
        "server.engine.h",
    }


def test_the_plugin_imports_what_the_engine_process_has() -> None:
    own = {"kernels", "deltas", "model", "metrics"}
    found = {
        (path.name, name)
        for path in python_files("vllm_plugin")
        for name in imports_of(path)
        if name.split(".")[0] in {*PACKAGES, "bench", "tests"} - {"deltastore"}
        and server_layer(name) not in own
    }
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_it_may(package: str) -> None:
    forbidden = {*PACKAGES, "bench", "tests"} - PACKAGES[package] - {package}
    found = {
        (path.name, name)
        for path in python_files(package)
        for name in imports_of(path)
        if name.split(".")[0] in forbidden
    }
    assert not found


def test_only_the_app_and_the_api_know_the_web_framework() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in production_files()
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


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("server.http_process", ("torch",)),
        ("server.supervisor.supervisor", ("torch", "transformers", "fastapi")),
        ("server.protocol.messages", ("torch", "transformers", "fastapi", "zmq")),
        ("client.variants", ("torch", "numpy", "pydantic", "server")),
        ("client.push", ("torch", "numpy", "pydantic", "server")),
        ("client.chat", ("torch", "numpy", "pydantic", "server")),
        ("peraxis.keys", ("torch", "numpy", "pydantic", "server")),
        ("compressor", ("torch", "transformers")),
        ("compressor.cli", ("torch", "transformers")),
        ("deltastore", ("torch", "pydantic")),
    ],
)
def test_a_process_imports_nothing_large_that_it_does_not_need(
    module: str, unneeded: tuple[str, ...]
) -> None:
    program = f"import sys, {module}; print({{*{unneeded!r}}} & {{*sys.modules}} or '')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stdout.strip()


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    too_long = {path.name: n for path in all_files() if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not too_long


def modules_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.stem != "__init__"]


def test_no_room_of_the_server_has_more_modules_than_a_reader_can_name() -> None:
    counts = {
        str(path.parent.relative_to(ROOT)): len(modules_in(path.parent))
        for path in python_files("server")
        if path.stem == "__init__"
    }
    too_many = {room: n for room, n in counts.items() if n > MAX_MODULES.get(room, MAX_MODULES_ELSEWHERE)}
    assert not too_many


def is_short(path: Path) -> bool:
    # An `__init__.py` is the package, and `__main__.py` what `python -m` runs.
    return not path.stem.startswith("__") and len(path.read_text().splitlines()) < SHORT_LINES


def test_a_short_file_joins_the_only_module_that_imports_it() -> None:
    """Imports by tests and benches do not count."""
    modules = {module_name(path): path for path in python_files(*PACKAGES)}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for imported in modules_of(imports_of(path), modules) - {name}:
            importers[imported].add(name)
    short = {name for name, path in modules.items() if is_short(path)}
    assert {name for name in short if len(importers[name]) == 1} == SHORT_ALONE.keys()


def test_tests_lie_in_folders_that_mirror_the_packages() -> None:
    folders = {path.parent for path in python_files(*(f"tests/{name}" for name in (*PACKAGES, "bench")))}
    assert not [
        folder for folder in folders - {folder for folder in folders if folder.name == "helpers"}
        if not (ROOT / folder.relative_to(ROOT / "tests")).is_dir()
    ]  # fmt: skip


def test_only_what_an_extra_is_for_imports_its_packages() -> None:
    """Imports inside functions do not count."""
    modules = {module_name(path): facts_of(path).imports_at_start for path in python_files(*PACKAGES)}
    needing = {name for name, names in modules.items() if {each.split(".")[0] for each in names} & EXTRAS}
    while more := {name for name, names in modules.items() if modules_of(names, needing)} - needing:
        needing |= more
    assert not [name for name in needing if not name.startswith(NEED_EXTRAS)]


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, the first one twice; empty if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_a_cycle_of_imports_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Imports inside functions and for types count, too."""
    modules = {module_name(path): path for path in all_files()}

    cycle = cycle_in({name: modules_of(imports_of(path), modules) - {name} for name, path in modules.items()})
    assert not cycle, " -> ".join(cycle)


def narrows_a_type(test: ast.expr) -> bool:
    """True for `x is not None` and `isinstance(x, T)`, also joined by `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(map(narrows_a_type, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def test_outside_tests_an_assert_narrows_a_type_and_does_nothing_else() -> None:
    """`python -O` removes assertions, so that nothing may depend on them."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in production_files()
        for line in facts_of(path).checking_asserts
    ]
    assert not found


def test_no_docstring_opens_with_a_fragment() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in all_files() for line in facts_of(path).fragments]
    assert not found
