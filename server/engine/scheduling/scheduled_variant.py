"""A variant that has waiting or running sequences, and its state on the way to a slot. Makes no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from server.engine.scheduling.fair_queue import VariantQueue
from server.engine.sequence import Sequence


class SlotState(Enum):
    """The state of a variant that has sequences."""

    COLD = auto()  # waits for a slot
    OVERDUE = auto()  # has waited for `cold_wait_s`
    LOADING = auto()
    OPEN = auto()  # resident and held; its sequences may be admitted
    CLOSED = auto()  # resident and held until its running sequences have ended

    @property
    def is_waiting(self) -> bool:
        return self in (SlotState.COLD, SlotState.OVERDUE)

    @property
    def is_held(self) -> bool:
        return self in (SlotState.OPEN, SlotState.CLOSED)


@dataclass(slots=True, eq=False)
class ScheduledVariant:
    """A variant that has waiting or running sequences."""

    digest: str
    state: SlotState
    waiting_since: float  # time at which it became cold
    opened_at: float = 0.0
    was_used: bool = False  # one of its sequences was admitted since it was opened
    num_waiting: int = 0  # sequences
    running: dict[int, Sequence] = field(default_factory=dict)  # by order
    queues: dict[VariantQueue, None] = field(default_factory=dict)  # those with waiting sequences

    @property
    def num_sequences(self) -> int:
        return self.num_waiting + len(self.running)

    @property
    def has_progressed(self) -> bool:
        """True if each of its running sequences has."""
        return all(sequence.has_progressed for sequence in self.running.values())
