"""Figures of streamed tokens."""

from __future__ import annotations

import pytest

from bench.streams import Span, StreamTimes, gaps_meeting, gaps_within, p99, tokens_per_s

STREAM = StreamTimes(begun=0.0, tokens=[1.0, 2.0, 4.0, 7.0])


def test_only_gaps_that_lie_in_a_span_are_within_it() -> None:
    assert gaps_within([STREAM], [Span(1.5, 7.0)]) == [2.0, 3.0]


def test_a_gap_meets_a_span_that_lies_inside_it() -> None:
    assert gaps_meeting([STREAM], [Span(2.5, 2.6), Span(2.7, 3.0)]) == [2.0]


def test_the_rate_counts_from_the_first_request_to_the_last_token() -> None:
    assert tokens_per_s([STREAM, StreamTimes(0.5, [8.0])]) == pytest.approx(5 / 8)


def test_a_percentile_of_one_value_is_refused() -> None:
    with pytest.raises(RuntimeError, match="longer"):
        p99([1.0])
