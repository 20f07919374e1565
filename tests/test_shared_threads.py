"""The lists in docs/security.md name each route, each message to the engine and each cache that tenants share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from server.api.access import ROLES
from server.protocol.messages import ClientMessage
from tests.test_structure import statements

ROOT = Path(__file__).resolve().parent.parent
SERVER, PAGE = ROOT / "server", ROOT / "docs" / "security.md"
# The classes that caches are made of, and how a function is given one.
CACHES, BOUNDED, UNBOUNDED = ("FairCache[", "OrderedDict["), "lru_cache", "cache"


def listed(head: str) -> list[str]:
    """Return the names in the first column of the table whose head begins with `head`."""
    section = PAGE.read_text().partition("\n## Shared threads\n")[2].partition("\n## Not protected\n")[0]
    rows = section.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert all(all(cell.strip() for cell in row.strip("|").split("|")) for row in rows)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_each_route_says_which_threads_its_clients_hold() -> None:
    assert sorted(listed("route")) == sorted(f"{method} {path}" for method, path in ROLES)


def test_each_message_says_what_it_takes_of_the_engines_thread() -> None:
    assert sorted(listed("message")) == sorted(message.__name__ for message in get_args(ClientMessage))


@dataclass(frozen=True, slots=True)
class Kept:
    """The definitions in one module of server/ that may keep what tenants send."""

    path: str  # within server/
    annotated: list[tuple[str, str]]  # variables and attributes with an annotation, and the annotation
    cached: list[tuple[str, str, str]]  # functions with a cache, their arguments, and how they are given it
    collections: list[str]  # assignments of empty collections at the module's own level


def annotated(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each variable and attribute that is annotated, and the annotation."""
    for node in nodes:
        if isinstance(node, ast.AnnAssign):
            name = node.target.attr if isinstance(node.target, ast.Attribute) else ast.unparse(node.target)
            yield name, ast.unparse(node.annotation)


def cached(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, str]]:
    """Yield each function that is given a cache, its arguments, and how."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            for each in node.decorator_list:
                how = ast.unparse(each).partition("(")[0].removeprefix("functools.")
                if how in (BOUNDED, UNBOUNDED):
                    yield node.name, ast.unparse(node.args), how


def begun_empty(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield each assignment of an empty collection."""
    for node in nodes:
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and ast.unparse(node.value) in ("{}", "[]", "set()", "dict()", "list()", "deque()")
        ):
            yield ast.unparse(node)


def kept_in(path: Path) -> Kept:
    tree = ast.parse(path.read_text())
    nodes = statements(tree)
    return Kept(
        str(path.relative_to(SERVER)),
        list(annotated(nodes)),
        list(cached(nodes)),
        list(begun_empty(tree.body)),
    )


@pytest.fixture(scope="module")
def modules() -> list[Kept]:
    """Each module of server/, parsed once for all tests."""
    return [kept_in(path) for path in sorted(SERVER.rglob("*.py"))]


def test_each_cache_that_tenants_share_says_what_goes_when_it_is_full(modules: list[Kept]) -> None:
    found = set[tuple[str, str]]()
    for each in modules:
        # The class itself is made of them.
        if each.path != "fairness.py":
            found |= {
                (each.path, name) for name, kind in each.annotated if any(cache in kind for cache in CACHES)
            }
            found |= {(each.path, name) for name, _, how in each.cached if how == BOUNDED}
    named, path = set[tuple[str, str]](), ""
    for name in listed("cache"):
        path = name if name.endswith(".py") else path
        named |= {(path, name)} - {(path, path)}
    assert named == found


def test_no_function_keeps_results_without_a_bound_for_what_tenants_send(modules: list[Kept]) -> None:
    kept = {
        f"{each.path}: {name}({arguments})"
        for each in modules
        for name, arguments, how in each.cached
        if how == UNBOUNDED and re.search(r"\b(str|bytes|int|tuple)\b", arguments)
    }
    # Each has a few arguments, which no tenant chooses.
    assert kept == {
        "api/openapi.py: _content(asset: str)",
        "kernels/__init__.py: _implementation(device_type: str)",
        "kernels/onebit_cpu.py: _packed_ends(*ends: int)",
        "kernels/onebit_cuda.py: _blocks(ends: tuple[int, ...], size: int, device: torch.device)",
        "model/attention.py: _single_token_kernel(device_type: str)",
        "protocol/control.py: _signature(method: str)",
        "workers/worker_process.py: template_of(modules: tuple[str, ...], niceness: int)",
    }


def test_no_module_has_a_collection_that_grows(modules: list[Kept]) -> None:
    assert not [(each.path, assignment) for each in modules for assignment in each.collections]
