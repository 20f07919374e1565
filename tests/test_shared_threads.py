"""The lists in docs/security.md name each route, each message to the engine and each cache that tenants share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from server.api.access import ROLES
from server.protocol.messages import ClientMessage

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


def annotated(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each variable and attribute that a module annotates, and the annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            name = node.target.attr if isinstance(node.target, ast.Attribute) else ast.unparse(node.target)
            yield name, ast.unparse(node.annotation)


def cached(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield each function of a module that is given a cache, and how."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for each in node.decorator_list:
                how = ast.unparse(each).partition("(")[0].removeprefix("functools.")
                if how in (BOUNDED, UNBOUNDED):
                    yield node, how


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SERVER.rglob("*.py")):
        yield str(path.relative_to(SERVER)), ast.parse(path.read_text())


def test_each_cache_that_tenants_share_says_what_goes_when_it_is_full() -> None:
    found = set[tuple[str, str]]()
    for path, tree in modules():
        # The class itself is made of them.
        if path != "fairness.py":
            found |= {(path, name) for name, kind in annotated(tree) if any(each in kind for each in CACHES)}
            found |= {(path, node.name) for node, how in cached(tree) if how == BOUNDED}
    named, path = set[tuple[str, str]](), ""
    for name in listed("cache"):
        path = name if name.endswith(".py") else path
        named |= {(path, name)} - {(path, path)}
    assert named == found


def test_no_function_keeps_results_without_a_bound_for_what_tenants_send() -> None:
    kept = {
        f"{path}: {node.name}({ast.unparse(node.args)})"
        for path, tree in modules()
        for node, how in cached(tree)
        if how == UNBOUNDED and re.search(r"\b(str|bytes|int|tuple)\b", ast.unparse(node.args))
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


def test_no_module_has_a_collection_that_grows() -> None:
    grown = {
        (path, ast.unparse(node))
        for path, tree in modules()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and ast.unparse(node.value) in ("{}", "[]", "set()", "dict()", "list()", "deque()")
    }
    assert not grown
