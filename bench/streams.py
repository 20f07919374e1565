"""Times of streamed tokens, and the figures made of them.

All times are seconds of `time.perf_counter`, which on Linux all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time."""

    began: float
    ended: float

    def holds(self, gap: Span) -> bool:
        return self.began <= gap.began and gap.ended <= self.ended

    def meets(self, gap: Span) -> bool:
        return self.began < gap.ended and gap.began < self.ended


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When one stream was asked for, and when each of its tokens came."""

    begun: float
    tokens: list[float]

    @property
    def gaps(self) -> Iterator[Span]:
        """The time between each token and the next one."""
        return (Span(a, b) for a, b in pairwise(self.tokens))

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.begun


def tokens_per_s(streams: Sequence[StreamTimes]) -> float:
    """Return the rate of all tokens, from the first request to the last token."""
    seconds = max(one.tokens[-1] for one in streams) - min(one.begun for one in streams)
    return sum(len(one.tokens) for one in streams) / seconds


def gap_seconds(streams: Iterable[StreamTimes]) -> list[float]:
    return [gap.ended - gap.began for one in streams for gap in one.gaps]


def gaps_within(streams: Iterable[StreamTimes], spans: Sequence[Span]) -> list[float]:
    """Return the seconds of the gaps that lie in one of `spans`."""
    return [
        gap.ended - gap.began for one in streams for gap in one.gaps if any(span.holds(gap) for span in spans)
    ]


def gaps_meeting(streams: Iterable[StreamTimes], spans: Sequence[Span]) -> list[float]:
    """Return the seconds of the gaps that share time with one of `spans`."""
    return [
        gap.ended - gap.began for one in streams for gap in one.gaps if any(span.meets(gap) for span in spans)
    ]


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile.

    Raises:
        RuntimeError: there are fewer than two values.
    """
    if len(values) < 2:
        raise RuntimeError(f"a percentile of {len(values)} values: measure for longer")
    return quantiles(values, n=100, method="inclusive")[98]
