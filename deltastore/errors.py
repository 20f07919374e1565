"""The exception tree of Peraxis. A message names the thing and the way out; `server/api/errors.py` maps it to HTTP."""

from __future__ import annotations

import copy
import os
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Self

from deltastore.memory import is_out_of_memory

MAX_REASON_CHARS = 300


class PeraxisError(Exception):
    """The root of every error that a user can cause or repair.

    Args:
        message: For operators and logs; it may name files of this machine.
        public: For clients of a server, if `message` names what they must not see, such as paths.
    """

    # Exit code of a command that ends with this error.
    exit_code: ClassVar[int] = 1
    # The code of the error if a server reported it.
    code: str | None = None

    def __init__(self, message: str, *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public

    def about(self, name: str) -> Self:
        """Return a copy whose messages begin with a name, for work that is done once for several things."""
        named = copy.copy(self)
        named.args = (f"{name}: {self}",)
        named.public = f"{name}: {self.public}"
        return named


class UsageError(PeraxisError):
    """Arguments that contradict each other or lie out of range."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting of the server that is out of range or contradicts another one."""


class CheckpointError(PeraxisError):
    """A checkpoint that cannot be read, or that differs from its base in what a delta cannot carry."""


class NotServable(PeraxisError):
    """A base that cannot be served: an unsupported architecture or device, or too little memory."""


class FidelityError(PeraxisError):
    """A delta whose agreement with its fine-tune is below the required minimum."""


class ArtifactError(PeraxisError):
    """An artifact that is malformed, truncated or does not match its digest."""


class CorruptObject(ArtifactError):
    """A stored object whose bytes no longer match its digest; `found_in` is the status of the file that was read."""

    def __init__(self, message: str, found_in: os.stat_result | None = None) -> None:
        super().__init__(message)
        self.found_in = found_in


class BaseMismatch(PeraxisError):
    """A delta that was made from another base."""


class ArtifactTooLarge(PeraxisError):
    """An artifact larger than a slot or than uploads may be."""


class RegistryError(PeraxisError):
    """A registry operation that failed by what the registry holds: a damaged record, changes of other servers."""


class RegistryUnavailable(PeraxisError):
    """The registry's volume or bucket fails, hangs, cannot be written or is gone. Its contents are not at fault.

    No RegistryError: whoever leaves out a damaged variant must not leave out one that could not be read.
    """


class RegistryUnwritable(RegistryError):
    """The registry can be read and cannot be written: its volume is read-only, or this user has no right to."""


class StorageFull(PeraxisError):
    """The disk of the registry, or of an output file, is full."""


class MemoryTooSmall(PeraxisError):
    """Work that needs more memory than is free."""


class VariantNotFound(PeraxisError):
    """No such variant or version exists, or the caller may not use it."""


class PublicNameTaken(PeraxisError):
    """A variant cannot become public, because another tenant's public variant has its name."""


class ActiveVersionChanged(PeraxisError):
    """A promotion rests on an active version that another change has replaced; nothing was changed."""


class VariantQuarantined(PeraxisError):
    """The version's stored object was found corrupt and is not served."""


def shown(value: object) -> str:
    """Format an untrusted value for a message: quoted, on one line, at most about 80 characters."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@contextmanager
def failures_as(make_error: Callable[[str], PeraxisError], *, hides_paths: bool = False) -> Iterator[None]:
    """Raise ``make_error(reason)`` for any failure of the block but lack of memory, interrupts and errors of Peraxis.

    For every call of transformers, tokenizers, peft and Jinja on files or text of others. They document no exceptions.
    On damaged input they raise plain `Exception`, RecursionError, ImportError, AssertionError and others, and a panic
    of Rust code is a BaseException.

    Args:
        make_error: The error of a reason, which is one short printable line that begins with the failure's class.
        hides_paths: Replace paths in the reason, for clients that must not see them.
    """
    try:
        yield
    except PeraxisError:
        raise
    except BaseException as error:
        is_failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_failure or is_out_of_memory(error):
            raise
        raise make_error(f"{type(error).__name__}: {_one_line(str(error), hides_paths)}") from error


def _one_line(text: str, hides_paths: bool) -> str:
    words = text[:4096].split()
    if hides_paths:
        words = ["(path)" if word.strip("'\"(`").startswith("/") else word for word in words]
    return "".join(filter(str.isprintable, " ".join(words)))[:MAX_REASON_CHARS]
