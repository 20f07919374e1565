"""One sample of a request while it runs: its tokens, what the cache holds of them, and the text they have become."""

from __future__ import annotations

from collections.abc import Sequence as Items

from server.engine.request import FinishEvent, FinishReason, PromptEvent, Request, ScoredToken, TokenEvent
from server.engine.sampling import Choice, Sampler
from server.engine.scheduling.kv_cache import PageTable
from server.text.stops import StopMatcher


class Sequence:
    """The scheduler's job and the cache's holder; the engine thread alone touches it."""

    def __init__(self, request: Request, index: int, arrived_at: float) -> None:
        self.request = request
        self.index = index  # among the request's `n` samples
        self.id = f"{request.id}/{index}"
        self.tenant = request.tenant
        self.digest = request.digest
        self.arrived_at = arrived_at
        self.tokens = list(request.prompt_ids)
        self.num_computed_tokens = 0
        self.held = PageTable()
        self.sampler = Sampler(request.sampling, index)
        self.last_token_at: float | None = None
        self._wants_prompt = request.sampling.prompt_logprobs is not None and index == 0
        self._prompt: list[ScoredToken] = []
        self._text = request.tokenizer.stream()
        self._stops = StopMatcher(request.sampling.stop)
        self._stopped_by_text = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def reuses_prefix(self) -> bool:
        """Every token's logits are computed where they are asked for."""
        return not self._wants_prompt

    def num_kept(self, num_tokens: int) -> int:
        """Of the next `num_tokens` to be computed, how many of the last ones' logits are read."""
        if self._wants_prompt:
            return num_tokens
        return int(self.num_computed_tokens + num_tokens == len(self.tokens))

    def read_prompt(self, scored: Items[ScoredToken]) -> None:
        """Take the scores of prompt tokens in order, and send them when they are complete."""
        self._prompt += scored
        if len(self._prompt) == len(self.request.prompt_ids) - 1:
            self._wants_prompt = False
            self.request.on_event(PromptEvent(tuple(self._prompt)))

    def forget_prompt(self) -> None:
        """Begin the prompt's scores anew: what was computed of it is lost."""
        self._prompt = []

    def accept(self, choice: Choice) -> FinishReason | None:
        """Append a chosen token and send it; why the sample ends with it, if it does."""
        self.tokens.append(choice.token_id)
        text, reason = self._read(choice.token_id)
        self.request.on_event(TokenEvent(self.index, choice.token_id, text, choice.logprob, choice.top))
        return reason

    def finish(self, reason: FinishReason) -> None:
        """Send the end of the sample and the text that was held back."""
        held = "" if self._stopped_by_text else self._stops.push(self._text.flush())[0] + self._stops.flush()
        self.request.on_event(FinishEvent(self.index, reason, held))

    def _read(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that the token makes visible, and whether it ends the sample."""
        sampling = self.request.sampling
        if token_id in self.request.tokenizer.eos_token_ids or token_id in sampling.stop_token_ids:
            return "", "stop"
        text, self._stopped_by_text = self._stops.push(self._text.push(token_id))
        if self._stopped_by_text:
            return text, "stop"
        return text, "length" if self.num_generated >= sampling.max_new_tokens else None
