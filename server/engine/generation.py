"""One request while it runs: its samples one after another, each token sent on as it is chosen."""

from __future__ import annotations

import time

from server.deltas.resident import ResidentDelta
from server.engine.request import FinishEvent, FinishReason, Request, TokenEvent
from server.engine.runner import Runner
from server.engine.sampling import Sampler
from server.engine.stops import StopMatcher


class Generation:
    """The state of a running request. `step` makes one token."""

    def __init__(self, request: Request, delta: ResidentDelta | None, runner: Runner) -> None:
        self.request = request
        self.delta = delta
        self.num_generated = 0
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.reason: FinishReason = "length"  # of the last sample that ended
        self.done = False
        self._runner = runner
        self._pending: list[int] = []  # tokens that the cache does not hold yet
        self._begin_sample(0)

    def step(self) -> None:
        """Run the tokens that are pending, choose the next one and send it."""
        rows = self.request.tokenizer.num_embeddings
        logits = self._runner.forward(self._pending, self._cache, self.delta, rows)
        choice = self._sampler.choose(logits, self._history)
        self._history.append(choice.token_id)
        self._pending = [choice.token_id]
        self.num_generated += 1
        self.last_token_at = time.monotonic()
        self.first_token_at = self.first_token_at or self.last_token_at
        text, reason = self._read(choice.token_id)
        self.request.on_event(TokenEvent(self._index, choice.token_id, text, choice.logprob, choice.top))
        if reason is not None:
            self.finish_sample(reason)

    def finish_sample(self, reason: FinishReason) -> None:
        """End the current sample and begin the next, if there is one and nobody cancelled."""
        held = "" if self._stopped_by_text else self._stops.push(self._text.flush())[0] + self._stops.flush()
        self.request.on_event(FinishEvent(self._index, reason, held))
        self.reason = reason
        if reason == "cancelled" or self._index + 1 == self.request.sampling.n:
            self.done = True
        else:
            self._begin_sample(self._index + 1)

    def _begin_sample(self, index: int) -> None:
        self._index = index
        self._cache = self._runner.new_cache()
        self._history = list(self.request.prompt_ids)
        self._pending = list(self.request.prompt_ids)
        self._sampler = Sampler(self.request.sampling, index)
        self._text = self.request.tokenizer.stream()
        self._stops = StopMatcher(self.request.sampling.stop)
        self._stopped_by_text = False

    def _read(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that the token makes visible, and whether it ends the sample."""
        sampling = self.request.sampling
        if token_id in self.request.tokenizer.eos_token_ids or token_id in sampling.stop_token_ids:
            return "", "stop"
        text, self._stopped_by_text = self._stops.push(self._text.push(token_id))
        if self._stopped_by_text:
            return text, "stop"
        num_new = len(self._history) - len(self.request.prompt_ids)
        return text, "length" if num_new >= sampling.max_new_tokens else None
