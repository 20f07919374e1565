"""Failures of libraries on tenants' files and requests, as errors of Peraxis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltastore.errors import PeraxisError

MAX_REASON_CHARS = 300


@contextmanager
def failures_as(make_error: Callable[[str], PeraxisError]) -> Iterator[None]:
    """Raise ``make_error(reason)`` for any failure of the block but lack of memory and errors of Peraxis.

    tokenizers, transformers and Jinja document no exceptions. On hostile input they raise plain `Exception`,
    RecursionError, ImportError, OverflowError and others, and a Rust panic is a BaseException.
    """
    try:
        yield
    except (PeraxisError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise make_error(f"{type(error).__name__}: {_one_line(str(error))}") from error


def _one_line(text: str) -> str:
    """Return a short printable form of an untrusted text, without paths of this server."""
    words = ("(path)" if word.strip("'\"(`").startswith("/") else word for word in text[:4096].split())
    return "".join(filter(str.isprintable, " ".join(words)))[:MAX_REASON_CHARS]
