"""Stop strings in text that arrives in parts."""

from __future__ import annotations

import pytest

from server.text.decoding.stops import StopMatcher


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def test_text_without_stop_strings_passes_unchanged() -> None:
    assert feed((), ["ab", "c"]) == ("abc", False)


@pytest.mark.parametrize("pieces", [["one\n\ntwo"], ["one\n", "\ntwo"], list("one\n\ntwo")])
def test_a_stop_string_is_found_however_it_is_cut(pieces: list[str]) -> None:
    assert feed(("\n\n",), pieces) == ("one", True)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.push("abST") == ("ab", False)
    assert matcher.push("xO") == ("STxO", False)


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert feed(("dd", "b"), ["aabccdd"]) == ("aa", True)


def test_held_text_comes_out_at_the_end() -> None:
    assert feed(("END",), ["the EN"]) == ("the EN", False)


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    assert feed(("aab",), ["a", "a", "a", "b"]) == ("a", True)
