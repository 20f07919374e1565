"""Sample the next token of sequences from their logits, and send it. Engine thread only; knows no plan and no mask."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from server.engine.model_runner import ModelRunner
from server.engine.requests.failing_alone import step_failed
from server.engine.requests.open_requests import OpenRequests
from server.engine.requests.request_state import RequestState
from server.engine.sampling.sampler import LastLogits
from server.engine.scheduling.kv_cache_manager import KVCacheManager
from server.engine.sequence import Sequence
from server.engine.telemetry import Telemetry

log = logging.getLogger(__name__)
T = TypeVar("T")


class NextTokens:
    """Samples sequences of open requests. A sequence that fails ends its request alone."""

    def __init__(
        self, runner: ModelRunner, requests: OpenRequests, kv_cache: KVCacheManager, telemetry: Telemetry
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._kv_cache = kv_cache
        self._telemetry = telemetry

    def sample_each(self, ready: list[tuple[Sequence, T]], gather: Callable[[list[T]], Tensor]) -> None:
        """Sample the next token of each sequence from its row of `gather`; if that fails, of each one alone.

        Args:
            ready: sequences, each with what `gather` needs to know of it.
            gather: returns logits ``[sequences, vocab]``.

        Raises:
            Exception: the model's own, if the device does not work any more.
        """
        if not ready:
            return
        try:
            last = LastLogits(gather([item for _, item in ready]))
        except Exception as error:
            log.exception("no logits to sample %s from", [sequence.id for sequence, _ in ready])
            if not self._runner.is_usable():
                raise
            if len(ready) > 1:
                for one in ready:
                    self.sample_each([one], gather)
            elif (failed := self._requests.find(ready[0][0].request_id)) is not None:
                self._requests.fail(failed, step_failed(error))
            return
        for row, (sequence, _) in enumerate(ready):
            # Its request may have failed just now with another of its sequences.
            if (state := self._requests.find(sequence.request_id)) is not None:
                with self._requests.failing_alone(state):
                    self._sample(state, sequence, last, row)

    def _sample(self, state: RequestState, sequence: Sequence, last: LastLogits, row: int) -> None:
        """Sample a sequence's next token and send it; start the request's second sequence behind the first token."""
        output = state.outputs[sequence.index]
        token = last.sample(row, state.request.num_embeddings, output.sampler)
        self._kv_cache.cache_full_pages(sequence)
        now = time.monotonic()
        reason = output.add_token(token)
        if state.first_token_at is None:
            state.first_token_at = now
            self._telemetry.first_token(state.request, state.lookup, state.timings(now))
        self._telemetry.tokens(state.request, "generation", 1)
        if output.last_token_at is not None:
            self._telemetry.next_token(now - output.last_token_at)
        output.last_token_at = now
        self._requests.start_next(state, sequence)
        if reason is not None:
            self._requests.finish_sequence(state, output, reason)
