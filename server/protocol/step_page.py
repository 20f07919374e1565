"""The page of memory in which an engine notes what it is about to compute, and which outlives it.

An engine that dies cannot say at which requests. So it writes their ids into a file that both processes map before each
step, and the supervisor reads it afterwards. The layout: the size of a Step in bytes (0 between steps), the number of
requests that the engine has finished, both of 8 bytes, then the Step in MessagePack.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from msgspec import DecodeError, Struct, msgpack

NUMBER = struct.Struct("<Q")
BEGIN = 2 * NUMBER.size
# Of one request: its id is an X-Request-Id and a number, and most have one sequence.
REQUEST_BYTES = 1024


class StepRequest(Struct, frozen=True, array_like=True):
    """A request in a step, and how far the step would bring it."""

    request_id: str
    tenant: str
    version: str | None  # its label; None is the base
    num_computed: dict[int, int]  # tokens of each sequence, by its index, that are computed after the step


class Suspect(Struct, frozen=True, array_like=True):
    """A request in the step in which an engine died.

    Attributes:
        alone: it is computed with no other request until it has come further than in that step.
    """

    request: StepRequest
    alone: bool = False


class Step(Struct, frozen=True, array_like=True):
    """A step that an engine has begun.

    Attributes:
        suspects: ids of the requests that are still to be tried, if the step tries some of them.
    """

    requests: tuple[StepRequest, ...]
    suspects: tuple[str, ...] = ()


class Record(Struct, frozen=True):
    """The content of the page when its engine died."""

    step: Step | None = None  # None: it died between two steps
    num_finished: int = 0  # requests


class StepPage:
    """The engine's side of the page.

    Args:
        max_requests: of one step.

    Raises:
        OSError: the file cannot be made, as on a full disk.
    """

    def __init__(self, path: Path, max_requests: int) -> None:
        size = BEGIN + max_requests * REQUEST_BYTES
        with path.open("wb+") as file:
            # Without holes: writing into one fails with a signal when the disk is full.
            file.write(bytes(size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), size)
        self._encoder = msgpack.Encoder()

    def begin(self, step: Step) -> None:
        """Note a step before it runs. One that is too large for the page is not noted."""
        raw = self._encoder.encode(step)
        if BEGIN + len(raw) <= len(self._memory):
            self._memory[BEGIN : BEGIN + len(raw)] = raw
            # Last, so that a reader never finds half of a step.
            NUMBER.pack_into(self._memory, 0, len(raw))

    def end(self, num_finished: int) -> None:
        """Note that the step is over, and how many requests the engine has finished."""
        NUMBER.pack_into(self._memory, 0, 0)
        NUMBER.pack_into(self._memory, NUMBER.size, num_finished)


def read_record(path: Path) -> Record:
    """Return what an engine that has died had noted; nothing if it never came to it."""
    try:
        raw = path.read_bytes()
        size, num_finished = NUMBER.unpack_from(raw, 0)[0], NUMBER.unpack_from(raw, NUMBER.size)[0]
        step = msgpack.decode(raw[BEGIN : BEGIN + size], type=Step) if size else None
    except (OSError, struct.error, DecodeError):
        return Record()
    return Record(step, num_finished)
