"""A cache that tenants share fairly."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """The most recently used values of one kind. The owner of the most values loses one when there are too many.

    Args:
        max_values: values of all owners together.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[K, tuple[V, str]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return a value, which is then the most recently used; None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V, owner: str) -> None:
        """Keep a value; drop the one that its owner, or an owner with more values, has used least recently."""
        self._values[key] = value, owner
        self._values.move_to_end(key)
        if len(self._values) > self._max_values:
            ((largest, _),) = Counter(other for _, other in self._values.values()).most_common(1)
            del self._values[next(key for key, (_, other) in self._values.items() if other == largest)]

    def drop(self, key: K) -> None:
        """Forget a value; no effect if there is none."""
        self._values.pop(key, None)
