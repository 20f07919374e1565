"""Stop strings in text that arrives in parts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.text.detokenizer import StopMatcher


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


def test_any_text_cut_anywhere_ends_where_a_plain_search_ends_it() -> None:
    chance = random.Random(0)
    for _ in range(500):
        stops = tuple(
            "".join(chance.choices("ab", k=chance.randrange(1, 7))) for _ in range(chance.randrange(1, 4))
        )
        text = "".join(chance.choices("abc", [4, 4, 1], k=40))
        pieces, rest = [], text
        while rest:
            size = chance.randrange(0, 6)
            pieces.append(rest[:size])
            rest = rest[size:]
        # A call that completes several stop strings is cut at the earliest of them.
        ends = [sum(map(len, pieces[: number + 1])) for number in range(len(pieces))]
        end = next((end for end in ends if any(stop in text[:end] for stop in stops)), None)
        whole = text if end is None else text[:end]
        starts = [whole.find(stop) for stop in stops if stop in whole]
        assert feed(stops, pieces) == (text[: min(starts)] if starts else text, end is not None)


class CountingText(str):
    """Text that counts how often its characters are read."""

    num_reads = 0

    def __getitem__(self, key: Any) -> CountingText:
        CountingText.num_reads += 1
        return CountingText(super().__getitem__(key))

    def find(self, *args: Any) -> int:
        CountingText.num_reads += 1
        return super().find(*args)

    def endswith(self, *args: Any) -> bool:
        CountingText.num_reads += 1
        return super().endswith(*args)

    def __add__(self, other: str) -> CountingText:
        return CountingText(super().__add__(other))

    def __radd__(self, other: str) -> CountingText:
        return CountingText(other + str(self))


def test_a_character_costs_the_same_whatever_is_held_back() -> None:
    stops = ("a" * 255 + "b", *("a" * number + "x" * (256 - number) for number in range(15)))
    matcher = StopMatcher(stops)
    CountingText.num_reads = 0
    for _ in range(1000):
        matcher.push(CountingText("a"))
    # Each is compared with the next one of each stop string and, on average, with that of one shorter prefix.
    assert CountingText.num_reads <= 1000 * (2 * len(stops) + 4)
