"""State of an admitted request until it is answered. Engine thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server.engine.sampling.logits_rules import PromptHistory
from server.engine.sampling.sampler import SampledToken, Sampler
from server.engine.sequence import Sequence
from server.errors import EngineFailed
from server.protocol.events import (
    Event,
    FinishEvent,
    FinishReason,
    PromptEvent,
    ScoredToken,
    Timings,
    TokenEvent,
)
from server.protocol.masks import allows_any, check_mask, mask_bytes
from server.protocol.messages import Level
from server.protocol.request import Request

OnEvent = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request between its admission and its last event."""

    request: Request
    on_event: OnEvent
    lookup: Level  # where its delta was when the engine took it in: device, host or disk; device for the base
    submitted_at: float  # when its client sent it
    first_mask: bytes | None = None  # of each of its sequences, if the request is constrained
    loaded_at: float | None = None  # when a cold request's delta became resident
    started_at: float | None = None  # when its first step began
    first_token_at: float | None = None
    arrival: int | None = None  # of its first sequence; None before
    last_started: int = -1  # index of the sequence that was started last; -1 before the first
    outputs: dict[int, SequenceOutput] = field(default_factory=dict)  # of unfinished sequences, by index
    unstarted: deque[int] = field(init=False)  # indices of sequences that are not made yet
    prompt: PromptHistory = field(init=False)  # for the samplers of all its sequences

    def __post_init__(self) -> None:
        self.unstarted = deque(range(self.request.sampling_params.n))
        self.prompt = PromptHistory(self.request.prompt_ids)

    @property
    def cold(self) -> bool:
        """True if its delta had to be loaded."""
        return self.lookup != "device"

    def start_sequence(self) -> Sequence:
        """Make the next of the request's `n` sequences."""
        self.last_started = self.unstarted.popleft()
        sequence = Sequence(self.request, self.last_started)
        self.outputs[sequence.index] = SequenceOutput(self, sequence)
        return sequence

    def timings(self, now: float) -> Timings:
        """Return the durations so far; a phase that has not ended counts until `now`."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        return Timings(
            queue_s=started - self.submitted_at,
            load_s=0.0 if self.loaded_at is None else self.loaded_at - self.submitted_at,
            cold=self.cold,
            ttft_s=first - self.submitted_at,
            total_s=now - self.submitted_at,
        )


class SequenceOutput:
    """Turns one sequence's sampled tokens into events, and finds its end."""

    def __init__(self, state: RequestState, sequence: Sequence) -> None:
        params = state.request.sampling_params
        self.sequence = sequence
        self.sampler = Sampler(params, sequence.index, state.prompt)
        self.last_token_at: float | None = None
        self.is_constrained = params.is_constrained
        # For the next token; None while it has not come, and of a sequence that is not constrained.
        self.mask = state.first_mask
        self._num_embeddings = state.request.num_embeddings
        self._on_event = state.on_event
        self._stop_token_ids = params.stop_token_ids
        self._num_left = params.max_new_tokens
        self._prompt_logprobs: list[ScoredToken] = []

    def add_prompt_logprobs(self, scored: list[ScoredToken]) -> None:
        """Take log-probabilities of prompt tokens, in order; send them when the prompt is complete."""
        self._prompt_logprobs += scored
        if len(self._prompt_logprobs) == self.sequence.num_prompt_tokens - 1:
            self.sequence.needs_prompt_logits = False
            self._on_event(PromptEvent(tuple(self._prompt_logprobs)))
            self._prompt_logprobs = []

    def clear_prompt_logprobs(self) -> None:
        """Forget the prompt's log-probabilities: the sequence was preempted and computes its prompt again."""
        self._prompt_logprobs = []

    @property
    def is_exhausted(self) -> bool:
        """True if its mask allows no token."""
        return self.mask is not None and not allows_any(self.mask, self._num_embeddings)

    def set_mask(self, position: int, bits: bytes | None) -> None:
        """Take the mask for the token at `position`; None ends the constraint. Earlier positions are ignored.

        Raises:
            EngineFailed: the sequence is not constrained, it has not come to `position`, or the size is wrong.
        """
        current = self.sequence.num_generated
        if position < current:
            return
        if position > current or not self.is_constrained:
            raise EngineFailed(
                f"a token mask for position {position} has come to sequence {self.sequence.id}, which is at "
                f"{current}{'' if self.is_constrained else ' and not constrained'}: send the request again"
            )
        if bits is None:
            self.is_constrained = False
            bits = b"\xff" * mask_bytes(self._num_embeddings)
        check_mask(bits, self._num_embeddings)
        self.mask = bits

    def add_token(self, token: SampledToken) -> FinishReason | None:
        """Append a sampled token to the sequence and send it. Return why the sequence ends with it, or None."""
        self.sequence.generated_ids.append(token.token_id)
        self.mask = None
        self._num_left -= 1
        self._on_event(TokenEvent(self.sequence.index, token.token_id, token.logprob, token.top))
        if token.token_id in self._stop_token_ids:
            return "stop"
        return "length" if self._num_left <= 0 else None

    def finish(self, reason: FinishReason) -> None:
        """Send the end of the sequence."""
        self._on_event(FinishEvent(self.sequence.index, reason))
