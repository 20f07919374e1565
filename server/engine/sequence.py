"""One sequence of a request while it runs: its tokens and what the KV cache holds of them."""

from __future__ import annotations

from server.engine.request import Request
from server.engine.scheduling.kv_cache import PageTable


class Sequence:
    """The scheduler's record of a sequence. Knows no text, no tokenizer and no callback; engine thread only."""

    def __init__(self, request: Request, index: int, arrived_at: float) -> None:
        self.request_id = request.id
        self.index = index  # among the request's `n` sequences
        self.id = f"{request.id}/{index}"
        self.tenant = request.tenant
        self.digest = request.digest
        self.arrived_at = arrived_at
        self.tokens = list(request.prompt_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.held = PageTable()
        # Until the prompt's log-probabilities are complete, the logits of all its tokens are computed.
        self.needs_prompt_logits = request.sampling_params.prompt_logprobs is not None and index == 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def reuses_prefix(self) -> bool:
        """False while prompt log-probabilities are requested: a cached prefix would skip those logits."""
        return not self.needs_prompt_logits

    def num_logits(self, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` to be computed, counted from the last, have their logits read."""
        if self.needs_prompt_logits:
            return num_tokens
        return int(self.num_computed_tokens + num_tokens == len(self.tokens))
