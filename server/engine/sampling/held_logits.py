"""Logits of constrained sequences until their masks come, and masks applied to logits. Engine thread only.

A step computes the logits of a sequence's next token without its mask, so the mask is computed while the step runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from server.engine.requests.request_state import SequenceOutput
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
    masks: list[bytes],  # one per row, as `server/protocol/masks.py` describes
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
