"""Logits of constrained sequences until their masks come. Engine thread only; knows no scheduler and no grammar.

A step computes the logits of a sequence's next token without its mask, so the mask is computed while the step runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from server.engine.requests.request_state import SequenceOutput
from server.engine.sampling.token_masks import apply_masks
from server.errors import MaskTimeout


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A sequence that can be sampled."""

    output: SequenceOutput
    logits: Tensor  # [vocab] float32
    mask: bytes


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
