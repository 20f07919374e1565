"""A variant that has waiting or running sequences, and its state on the way to a slot. Makes no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from server.engine.sequence import Sequence, VariantQueue


class SlotState(Enum):
    """The state of a variant that has sequences."""

    # Waiting for a slot; it may still be resident, since a slot keeps its delta until another needs it.
    WAITING = auto()
    OVERDUE = auto()  # has waited for `cold_wait_s`
    LOADING = auto()
    OPEN = auto()  # resident and held; its sequences may be admitted
    CLOSED = auto()  # resident and held until its running sequences have ended

    @property
    def is_waiting(self) -> bool:
        return self in (SlotState.WAITING, SlotState.OVERDUE)

    @property
    def is_held(self) -> bool:
        return self in (SlotState.OPEN, SlotState.CLOSED)


@dataclass(slots=True, eq=False)
class ScheduledVariant:
    """A variant that has waiting or running sequences."""

    digest: str
    state: SlotState
    waiting_since: float  # when it began to wait for a slot
    opened_at: float = 0.0
    was_used: bool = False  # one of its sequences was admitted since it was opened
    num_waiting: int = 0  # sequences
    running: dict[int, Sequence] = field(default_factory=dict)  # by arrival
    queues: dict[VariantQueue, None] = field(default_factory=dict)  # those with waiting sequences

    @property
    def num_sequences(self) -> int:
        return self.num_waiting + len(self.running)

    @property
    def has_progressed(self) -> bool:
        """True if each of its running sequences has."""
        return all(sequence.has_progressed for sequence in self.running.values())
