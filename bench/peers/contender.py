"""One way to answer a batch of requests, and its times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

Prompts = Sequence[Sequence[int]]  # token ids
Key = tuple[str, int, int]  # name, requests at a time, variants


@dataclass(slots=True)
class Contender:
    """One way to answer so many requests at a time, and its times."""

    name: str
    num_requests: int
    num_variants: int  # 0 is the base alone
    # Called with the prompts and the number of new tokens of each.
    answer: Callable[[Prompts, int], object]
    tokens_per_s: list[float] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.name, self.num_requests, self.num_variants

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return median(self.tokens_per_s)


def check_length(found: int, expected: int) -> None:
    """Check the number of tokens of an answer, whose time would not be comparable otherwise.

    Raises:
        RuntimeError: it is another one.
    """
    if found != expected:
        raise RuntimeError(f"{expected} tokens were asked for, {found} were generated")
