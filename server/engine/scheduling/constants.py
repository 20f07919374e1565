"""Constants of scheduling. No setting changes them; tests do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConstants:
    """Shares of a step, costs of its tokens, and the waiting times after which a sequence preempts another.

    Raises:
        ValueError: a value is out of its range; names the field.
    """

    # Weights of one token in the fairness counters.
    prompt_token_cost: float = 1.0
    generated_token_cost: float = 2.0
    # Cost of reading one delta in a step, in tokens; its sequences share it.
    delta_cost_tokens: float = 8.0
    # Share of a step's tokens that one prompt may take while another waits for them.
    prefill_share: float = 0.25
    # Free KV cache tokens that admission leaves for each running sequence to grow.
    reserve_tokens: int = 32
    # Waiting time after which a sequence may preempt one of a tenant or variant that has several running.
    preempt_wait_s: float = 1.0
    # Time for which a loaded variant keeps its slot.
    min_resident_s: float = 1.0
    # Waiting time after which a variant may take another variant's slot by preempting its sequences.
    cold_wait_s: float = 5.0
    # Tokens recomputed after such preemptions, as a share of all computed tokens.
    recompute_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("prefill_share", "recompute_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
