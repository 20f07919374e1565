"""Compares the files that ARCHITECTURE.md names with those that a request and a delta pass through."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from tests.replay.source_tree import ROOT, SourceTree
from tests.server.helpers.live_server import make_artifacts
from tests.ways.call_hook import FileCall
from tests.ways.recorder import Way, Ways, record

# An item of a numbered list, with the lines that continue it.
ITEM = re.compile(r"^(\d+)\. (.*?)(?=^\S)", re.MULTILINE | re.DOTALL)
# The items of a delta's way: a fit, an upload, and its load for a request.
FIT, UPLOAD = range(1, 4), range(4, 5)


def differences(names: Sequence[str], way: Way) -> Iterator[str]:
    """Yield each file, named by the end of its path, that is not on the way, or comes before the one named last."""
    previous, previous_ns = "", 0
    for name in dict.fromkeys(names):
        calls = [call for call in way.calls if f"/{call.file}".endswith(f"/{name}")]
        if not calls:
            yield f"{name} is not called"
            continue
        # A file may be called in several processes: one of these calls is meant.
        times_ns = [call.at_ns for call in calls if call.file not in way.idle]
        if times_ns and times_ns[-1] < previous_ns:
            yield f"{name} is called before {previous}"
        elif times_ns:
            previous, previous_ns = name, next(at_ns for at_ns in times_ns if at_ns >= previous_ns)


def _named(section: str) -> dict[int, list[str]]:
    """Return the names of Python files in each item of the numbered lists of a section of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    body = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {int(number): re.findall(r"`([\w/]+\.py)`", item) for number, item in ITEM.findall(body + "\nend")}


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    scratch = tmp_path_factory.mktemp("ways")
    return record(SourceTree(ROOT), make_artifacts(scratch / "inputs"), scratch / "work")


def test_the_way_of_a_request_is_as_described(ways: Ways) -> None:
    named = _named("One request")
    assert list(named) == list(range(1, len(named) + 1))
    # The last item names files again that have been called before.
    names = [name for item in list(named)[:-1] for name in named[item]]
    assert len(names) > 30
    assert list(differences(names, ways.request)) == []
    assert list(differences(named[len(named)], Way(ways.request.calls, ways.request.files))) == []


def test_the_way_of_a_delta_is_as_described(ways: Ways) -> None:
    named = _named("One delta")
    for item, way in ((FIT, ways.fit), (UPLOAD, ways.upload)):
        names = [name for number in item for name in named.pop(number)]
        assert len(names) > 7
        assert list(differences(names, way)) == []
    assert list(differences([name for names in named.values() for name in names], ways.request)) == []


def test_a_file_that_is_not_called_and_one_in_the_wrong_place_are_found() -> None:
    calls = [
        FileCall(at_ns, "a", f"server/{name}.py") for at_ns, name in enumerate(("one", "two", "three"), 1)
    ]
    way = Way(calls, {"server/two.py"})
    assert list(differences(["server/one.py", "two.py", "three.py", "two.py"], way)) == []
    assert list(differences(["three.py", "two.py", "one.py", "four.py"], way)) == [
        "one.py is called before three.py",
        "four.py is not called",
    ]
