"""One sequence of a request while it runs: its tokens, its KV cache pages, and the scheduler's record of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.request import Request
from server.engine.scheduling.fair_queue import VariantQueue


@dataclass(slots=True)
class PageTable:
    """The KV cache pages of one sequence, in order, and the prefix cache keys of those that are full."""

    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    is_counted: bool = True  # in the hits and queries of the prefix cache


class Sequence:
    """The tokens of one sequence and the scheduler's record of it. Knows no text, no tokenizer and no callback.

    Only the engine thread uses it. The KV cache owns `page_table` and resets `num_computed_tokens`; the scheduler owns
    `queue` and all below it.
    """

    # The waiting and running sequences of its tenant and variant; set by `Scheduler.add`.
    queue: VariantQueue

    def __init__(self, request: Request, index: int) -> None:
        self.request_id = request.id
        self.index = index  # among the request's `n` sequences
        self.id = f"{request.id}/{index}"
        self.tenant = request.tenant
        self.digest = request.digest
        self.tokens = list(request.prompt_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.page_table = PageTable()
        # Until the prompt's log-probabilities are complete, the logits of all its tokens are computed.
        self.needs_prompt_logits = request.sampling_params.prompt_logprobs is not None and index == 0
        self.arrival = -1  # number among all sequences ever added to the scheduler; -1 before
        self.waiting_since = 0.0
        self.num_tokens_at_admission = 0
        self.num_charged_tokens = 0  # prompt tokens charged so far; recomputing them costs nothing

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_missing_tokens(self) -> int:
        """Number of tokens that the KV cache does not hold; 1 for a sequence that decodes."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def is_waiting(self) -> bool:
        return self.arrival in self.queue.waiting

    @property
    def has_progressed(self) -> bool:
        """True once it has generated a token since it was admitted; preempting earlier wastes the prefill."""
        return len(self.tokens) > self.num_tokens_at_admission

    @property
    def reuses_prefix(self) -> bool:
        """False when prompt logprobs are requested: a cached prefix would skip those logits."""
        return not self.needs_prompt_logits

    def num_logits(self, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` to be computed, counted from the last, have their logits read."""
        if self.needs_prompt_logits:
            return num_tokens
        return int(self.num_computed_tokens + num_tokens == len(self.tokens))
