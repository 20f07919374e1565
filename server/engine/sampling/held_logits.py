"""Logits of constrained sequences until their masks come. Engine thread only; knows no scheduler and no grammar.

A step computes the logits of a sequence's next token without its mask, so the mask is computed while the step runs.
"""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from server.engine.request_state import SequenceOutput
from server.engine.sampling.token_masks import apply_masks
from server.errors import MaskTimeout


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

    def take_ready(self) -> tuple[list[SequenceOutput], Tensor] | None:
        """Remove the sequences whose masks have come. Return them and their masked logits ``[sequences, vocab]``."""
        masks = {output: output.mask for output in self._rows if output.mask is not None}
        rows = [self._rows.pop(output) for output in masks]
        for output in self._views & self._rows.keys():
            # A view would keep the logits of its whole step.
            self._rows[output] = self._rows[output].clone()
        self._views.clear()
        if not masks:
            return None
        for output in masks:
            del self._waiting_since[output]
        # Steps with variants of more tokens have wider logits.
        logits = pad_sequence(rows, batch_first=True, padding_value=-torch.inf)
        return list(masks), apply_masks(logits, list(masks.values()))

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


def mask_timeout(mask_timeout_s: float) -> MaskTimeout:
    """Return the error of a request whose sequence waited too long for a mask."""
    return MaskTimeout(
        f"the tokens that the response format allows next were not computed within {mask_timeout_s:g} s: "
        "try again in a moment, or send a simpler schema"
    )
