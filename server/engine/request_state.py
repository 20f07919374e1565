"""State of an admitted request: its outputs, masks and held logits, and its wait for a load. Engine thread only.

A mask is packed as llguidance writes it: bit ``i % 8`` of byte ``i // 8`` allows token ``i``.

A step computes the logits of a sequence's next token without its mask, so the mask is computed while the step runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from server.deltas.residency import Residency
from server.engine.sampler import PromptHistory, SampledToken, Sampler
from server.engine.sequence import Sequence
from server.errors import EngineFailed, MaskTimeout
from server.protocol.messages import (
    Event,
    FinishEvent,
    FinishReason,
    Level,
    Progress,
    PromptEvent,
    ScoredToken,
    SequenceProgress,
    Timings,
    TokenEvent,
)
from server.protocol.request import Request
from server.protocol.step_page import Suspect

# llguidance writes words of 32 bits.
WORD_BITS = 32


def mask_bytes(num_embeddings: int) -> int:
    """Return the size in bytes of a mask for token ids below `num_embeddings`."""
    return -(-num_embeddings // WORD_BITS) * WORD_BITS // 8


def check_mask(bits: bytes, num_embeddings: int) -> None:
    """Raise EngineFailed if a mask has another size than `mask_bytes`."""
    if len(bits) != mask_bytes(num_embeddings):
        raise EngineFailed(
            f"a token mask has {len(bits)} bytes, and one for {num_embeddings} tokens has "
            f"{mask_bytes(num_embeddings)}: send the request again"
        )


def allows_any(bits: bytes, num_embeddings: int) -> bool:
    """Return whether a mask allows a token id below `num_embeddings`; the bits behind it mean nothing."""
    num_whole, num_rest = divmod(num_embeddings, 8)
    # Comparing with zeros takes less than a microsecond.
    if bits[:num_whole] != bytes(num_whole):
        return True
    return num_rest > 0 and bits[num_whole] % (1 << num_rest) > 0


def check_first_mask(request: Request, first_mask: bytes | None) -> None:
    """Raise EngineFailed unless a constrained request comes with a valid mask, and any other without one."""
    if request.sampling_params.is_constrained != (first_mask is not None):
        kind = (
            "a constrained request came without"
            if first_mask is None
            else "an unconstrained request came with"
        )
        raise EngineFailed(f"{kind} a token mask: send the request again")
    if first_mask is not None:
        check_mask(first_mask, request.num_embeddings)


OnEvent = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request between its admission and its last event."""

    request: Request
    on_event: OnEvent
    lookup: Level  # where its delta was when the engine took it in: device, host or disk; device for the base
    submitted_at: float  # when its client sent it
    first_mask: bytes | None = None  # of each of its sequences, if the request is constrained
    progress: Progress | None = None  # if an engine before this one had the request
    is_paused: bool = False  # its events are not read
    is_out: bool = False  # its sequences wait outside all queues
    asked_at: float = math.inf  # when its first sequence was scheduled, and its delta wanted
    loaded_at: float | None = None  # when a cold request's delta became resident
    started_at: float | None = None  # when its first step began
    first_token_at: float | None = None
    num_cached: int = 0  # tokens of the prompt that the prefix cache had when it was first computed
    arrival: int | None = None  # of its first sequence; None before
    last_started: int = -1  # index of the sequence that was started last; -1 before the first
    outputs: dict[int, SequenceOutput] = field(default_factory=dict)  # of unfinished sequences, by index
    unstarted: deque[int] = field(init=False)  # indices of sequences that are not made yet
    prompt: PromptHistory = field(init=False)  # for the samplers of all its sequences

    def __post_init__(self) -> None:
        self.prompt = PromptHistory(self.request.prompt_ids)
        indices = range(self.request.sampling_params.n)
        if self.progress is None:
            self.unstarted = deque(indices)
        else:
            self.unstarted = deque(i for i in indices if not self.progress.sequences[i].is_over)
            self.first_token_at = self.progress.first_token_at
            self.is_paused = self.progress.is_paused

    @property
    def cold(self) -> bool:
        """True if its delta had to be loaded."""
        return self.lookup != "device"

    def start_sequence(self) -> Sequence:
        """Make the next of the request's `n` sequences."""
        self.last_started = self.unstarted.popleft()
        sequence = Sequence(self.request, self.last_started)
        output = self.outputs[sequence.index] = SequenceOutput(self, sequence)
        if self.progress is not None:
            sequence.needs_prompt_logits &= not self.progress.has_prompt
            output.resume(self.progress.sequences[sequence.index])
        return sequence

    def timings(self, now: float) -> Timings:
        """Return the durations so far; a phase that has not ended counts until `now`.

        Of a request that another engine began, no phase before the first token counts beyond it.
        """
        first = now if self.first_token_at is None else self.first_token_at
        started = first if self.started_at is None else min(first, self.started_at)
        loaded = self.submitted_at if self.loaded_at is None else min(first, self.loaded_at)
        return Timings(
            queue_s=started - self.submitted_at,
            load_s=loaded - self.submitted_at,
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
        sequence.sampling_cost = self.sampler.cost
        self.last_token_at: float | None = None
        self.is_constrained = params.is_constrained
        # For the next token; None while it has not come, and of a sequence that is not constrained.
        self.mask = state.first_mask
        self._num_embeddings = state.request.num_embeddings
        self._on_event = state.on_event
        self._stop_token_ids = params.stop_token_ids
        self._num_left = params.max_new_tokens
        self._prompt_logprobs: list[ScoredToken] = []

    def resume(self, progress: SequenceProgress) -> None:
        """Go on behind the tokens that the client has."""
        self.sequence.resume(progress.token_ids)
        for token_id in progress.token_ids:
            self.sampler.add(token_id)
        self._num_left -= len(progress.token_ids)
        self.is_constrained &= not progress.is_free
        if progress.is_free:
            self.mask = None
        elif progress.token_ids or progress.mask is not None:
            self.mask = progress.mask

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
        return self.end

    @property
    def end(self) -> FinishReason | None:
        """Why the sequence ends with its last token, or None."""
        if not self._stop_token_ids.isdisjoint(self.sequence.generated_ids[-1:]):
            return "stop"
        return "length" if self._num_left <= 0 else None

    def finish(self, reason: FinishReason) -> None:
        """Send the end of the sequence."""
        self._on_event(FinishEvent(self.sequence.index, reason))


class WaitingRequests:
    """Requests that wait for their first step; tells which of them wait for a load.

    Args:
        load_timeout_s: after which a request whose delta is not resident is late.
    """

    def __init__(self, residency: Residency, load_timeout_s: float) -> None:
        self._residency = residency
        self._load_timeout_s = load_timeout_s
        self._by_version: dict[str | None, dict[str, RequestState]] = {}  # by version, then request id

    @property
    def num_requests(self) -> int:
        return sum(map(len, self._by_version.values()))

    @property
    def num_loading(self) -> int:
        """Number of requests whose delta is not resident; O(variants that wait)."""
        return sum(len(self._by_version[version]) for version in self._not_resident())

    def add(self, state: RequestState) -> None:
        """Add an admitted request."""
        self._by_version.setdefault(state.request.version, {})[state.request.id] = state

    def remove(self, state: RequestState) -> None:
        """Remove a request whose first step begins, or that ends without one."""
        waiting = self._by_version[state.request.version]
        del waiting[state.request.id]
        if not waiting:
            del self._by_version[state.request.version]

    def load_ended(self, version: str, now: float) -> None:
        """Note when the delta of cold requests became resident, or its load failed."""
        for state in self._by_version.get(version, {}).values():
            if state.cold and state.loaded_at is None:
                state.loaded_at = now

    def late(self, now: float) -> list[RequestState]:
        """Return the requests whose delta was not loaded in time."""
        return [
            state
            for version in self._not_resident()
            for state in self._by_version[version].values()
            if now - state.asked_at > self._load_timeout_s
        ]

    def _not_resident(self) -> list[str]:
        return [
            version
            for version in self._by_version
            if version is not None and not self._residency.is_resident(version)
        ]


# Suspects that are tried together.
MAX_TOGETHER = 8
# How long clients have to send the suspects again; those that come later are not tried.
ARRIVAL_S = 2.0


class Trial:
    """Tries the requests with which the engine before this one died: few at a time, or alone, with nothing beside them.

    Until all of them have come as far as the step that failed would have brought them, every other request is held. So
    an engine that dies again names few suspects, and requests that are not at fault do not fail with it. A suspect is
    tried also while its events are not read, so that no client decides how long the others are held.

    Args:
        suspects: all that are to be tried.
        now: seconds on the clock of `turn`.
    """

    def __init__(self, suspects: Iterable[Suspect], now: float) -> None:
        self._suspects = {suspect.request.request_id: suspect for suspect in suspects}
        self._deadline = now + ARRIVAL_S
        self._tried: dict[str, RequestState] = {}
        self._held: dict[str, RequestState] = {}

    @property
    def suspects(self) -> tuple[str, ...]:
        """Ids of the requests that are still to be tried."""
        return tuple(self._suspects)

    def hold(self, state: RequestState) -> bool:
        """Hold a new request, and return True, while there is something to try."""
        if self._suspects:
            self._held[state.request.id] = state
        return bool(self._suspects)

    def turn(self, now: float, is_open: Container[str]) -> tuple[list[RequestState], list[RequestState]]:
        """Return the requests that must pause now, and those that may then start or go on.

        Args:
            is_open: ids of the requests that have not ended.
        """
        if not self._suspects:
            return [], []
        tried = {id_: state for id_, state in self._tried.items() if id_ in is_open}
        if not all(_has_passed(state, self._suspects[id_]) for id_, state in tried.items()):
            return [], []
        for id_ in self._tried:
            del self._suspects[id_]
        self._tried = {}
        self._held = {id_: state for id_, state in self._held.items() if id_ in is_open}
        waiting = [suspect for id_, suspect in self._suspects.items() if id_ in self._held]
        if not waiting and now >= self._deadline:
            self._suspects.clear()
        if not self._suspects:
            held, self._held = self._held, {}
            unread = [state for state in tried.values() if state.is_paused]
            return unread, [state for state in held.values() if not state.is_paused]
        alone = [suspect for suspect in waiting if suspect.alone]
        chosen = [suspect.request.request_id for suspect in (alone[:1] or waiting[:MAX_TOGETHER])]
        self._tried = {id_: self._held.pop(id_) for id_ in chosen}
        self._held |= tried
        return list(tried.values()), list(self._tried.values())


def _has_passed(state: RequestState, suspect: Suspect) -> bool:
    """Return whether all sequences of a request have come as far as the step that failed would have brought them."""
    for index, num_computed in suspect.request.num_computed.items():
        output = state.outputs.get(index)
        if index in state.unstarted:
            return False
        if output is not None and output.sequence.num_computed_tokens < num_computed:
            return False
    return True


class HeldLogits:
    """A row of logits for each running sequence that waits for its mask, and the time since when it waits.

    Args:
        timeout_s: after which a sequence without a mask is late.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rows: dict[SequenceOutput, Tensor] = {}
        # Those whose rows are views of the last step's logits.
        self._views: set[SequenceOutput] = set()
        # In order of time. Kept while a preempted sequence computes its logits again.
        self._waiting_since: dict[SequenceOutput, float] = {}

    def hold(
        self,
        output: SequenceOutput,
        logits: Tensor,  # [vocab] float32
        now: float,
    ) -> None:
        """Take the logits of a sequence's next token."""
        self._rows[output] = logits
        self._views.add(output)
        self._waiting_since.setdefault(output, now)

    def take_ready(self) -> list[Held]:
        """Remove and return the sequences whose masks have come."""
        ready = [Held(o, row, o.mask) for o, row in self._rows.items() if o.mask is not None]
        for held in ready:
            self._views.discard(held.output)
            del self._rows[held.output], self._waiting_since[held.output]
        return ready

    def take_views(self) -> list[SequenceOutput]:
        """Return the sequences whose rows are still views of the last step's logits; call `keep_copy` for each."""
        views, self._views = self._views, set()
        return [output for output in self._rows if output in views]

    def keep_copy(self, output: SequenceOutput) -> None:
        """Copy a sequence's row, if it is held: a view would keep the logits of its whole step."""
        if output in self._rows:
            self._rows[output] = self._rows[output].clone()

    def drop(self, output: SequenceOutput) -> None:
        """Drop the logits of a preempted sequence, which computes them again."""
        self._rows.pop(output, None)

    def forget(self, output: SequenceOutput) -> None:
        """Forget a sequence that has ended."""
        self.drop(output)
        self._waiting_since.pop(output, None)

    def late(self, now: float) -> list[SequenceOutput]:
        """Return the sequences whose masks have not come in time."""
        waiting = takewhile(lambda item: now - item[1] > self._timeout_s, self._waiting_since.items())
        return [output for output, _ in waiting if output.mask is None]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A sequence that can be sampled."""

    output: SequenceOutput
    logits: Tensor  # [vocab] float32
    mask: bytes


def masked(ready: list[Held]) -> Tensor:
    """Return the logits ``[sequences, vocab]`` of sequences; those of tokens outside the masks are minus infinity."""
    # Steps with variants of more tokens have wider logits.
    logits = pad_sequence([held.logits for held in ready], batch_first=True, padding_value=-torch.inf)
    return apply_masks(logits, [held.mask for held in ready])


def mask_timeout(mask_timeout_s: float) -> MaskTimeout:
    """Return the error of a request whose sequence waited too long for a mask."""
    return MaskTimeout(
        f"the tokens that the response format allows next were not computed within {mask_timeout_s:g} s: "
        "try again in a moment, or send a simpler schema"
    )


def apply_masks(
    logits: Tensor,  # [rows, vocab] float32, changed in place
    masks: list[bytes],  # one per row, packed
) -> Tensor:
    """Set the logits of tokens that a row's mask does not allow to minus infinity; keep the others bit for bit.

    A mask may be shorter than the vocabulary of the batch: tokens beyond it are not allowed. NaN stays NaN.
    """
    num_bytes = -(-logits.shape[1] // 8)
    packed = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    # In memory that may be written to, as torch asks for.
    values = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(len(masks), num_bytes)
    # One copy to the device per byte, not per token.
    bounds = functional.embedding(values.to(logits.device).int(), _BOUNDS.to(logits.device))
    return torch.minimum(logits, bounds.flatten(1)[:, : logits.shape[1]], out=logits)


def _bounds() -> Tensor:
    """Return the upper bounds ``[256, 8]`` of eight logits for each value of their byte of a mask."""
    allowed = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(allowed == 1, torch.inf, -torch.inf)


# Looked up, because comparisons of single bits take several times as long.
_BOUNDS = _bounds()
