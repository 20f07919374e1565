"""Functions that run in worker processes, on tenants' files: load, encode, render, decode, check.

Loaded tokenizers stay in the worker's memory within a bound. Imports no torch and knows no pool.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from deltastore.errors import ArtifactError, PeraxisError
from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES
from server.errors import InvalidRequest
from server.text.conversation import Conversation
from server.text.failures import failures_as
from server.text.files import (
    check_sizes,
    read_tokenizer_files,
    tokenizer_files,
    without_template,
    write_tokenizer,
)
from server.text.generation_config import read_generation
from server.text.loaded_tokenizer import LoadedTokenizer

# Modules that a worker of `server.workers.pool` imports before its first task.
WORKER_MODULES = ("server.text.without_torch", "server.text.worker_tasks")
# Bound on loaded tokenizers in one worker. The newest one stays whatever its size is.
CACHE_BYTES = 512 << 20
# Memory of a loaded tokenizer over the size of its files, measured with 256,000 tokens and 500,000 merges.
BYTES_PER_FILE_BYTE = 16
PROBE_TEXT = "A probe: 1 + 2 = 3, naïve 漢字\n"
PROBE_TOKENS = 4096
PROBE_CONVERSATION = Conversation([{"role": "user", "content": "hi"}])

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NotLoaded(PeraxisError):
    """A tokenizer that this worker does not have loaded, and whose files were not given."""


class _Loaded:
    """The tokenizers that this process has loaded, by the content of their files."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[str, tuple[LoadedTokenizer, int]] = OrderedDict()

    def get(self, key: str, directory: Path | None, where: str) -> LoadedTokenizer:
        """Return a tokenizer; load it from `directory` if need be."""
        if key in self._tokenizers:
            self._tokenizers.move_to_end(key)
            return self._tokenizers[key][0]
        if directory is None:
            raise NotLoaded(f"{where}: its tokenizer is not loaded in this worker")
        files = [path for path in directory.iterdir() if path.name in TOKENIZER_FILES]
        num_bytes = BYTES_PER_FILE_BYTE * sum(path.stat().st_size for path in files)
        self._make_space(num_bytes)
        tokenizer = LoadedTokenizer.load(directory, where)
        self._tokenizers[key] = tokenizer, num_bytes
        return tokenizer

    def _make_space(self, num_bytes: int) -> None:
        while (
            self._tokenizers and num_bytes + sum(size for _, size in self._tokenizers.values()) > CACHE_BYTES
        ):
            self._tokenizers.popitem(last=False)


_loaded = _Loaded()


def with_tokenizer(
    key: str,
    directory: Path | None,
    where: str,
    function: Callable[[LoadedTokenizer, *Ts], T],
    args: tuple[*Ts],
) -> T:
    """Call ``function(tokenizer, *args)`` with a loaded tokenizer.

    Args:
        key: the name of its content.
        directory: its files; None if this worker should have it loaded.
        where: its owner's name in error messages.

    Raises:
        NotLoaded: `directory` is None and the tokenizer is not loaded.
        ArtifactError: it cannot be loaded.
        PeraxisError: as `function` raises it.
    """
    with _failures_of(where):
        tokenizer = _loaded.get(key, directory, where)
        with _named(where):
            return function(tokenizer, *args)


def probe(tokenizer: LoadedTokenizer) -> None:
    """Encode and decode a text; ArtifactError if the tokenizer cannot."""
    try:
        ids = tokenizer.encode(PROBE_TEXT, PROBE_TOKENS, True, "probe")
    except InvalidRequest as error:
        raise ArtifactError(f"its tokenizer cannot be used: {error}") from error
    tokenizer.decode(ids)
    tokenizer.decode_each(ids)


def _try_template(tokenizer: LoadedTokenizer) -> None:
    """Render a conversation. Only the death of this process is a failure: a template may refuse a conversation."""
    with contextlib.suppress(InvalidRequest):
        tokenizer.render_chat(PROBE_CONVERSATION, PROBE_TOKENS)


def check_text_files(
    files: Mapping[str, bytes], base_dir: Path, num_embeddings: int, where: str = "the upload"
) -> None:
    """Check an artifact's tokenizer, chat template and generation config by using them. Runs in a worker only.

    Args:
        files: the artifact's files by name.
        base_dir: the base's checkpoint.
        num_embeddings: rows of the artifact's embedding.
        where: the artifact's name in error messages.

    Raises:
        ArtifactError: a file is too large or cannot be used.
    """
    check_sizes(files, where)
    if GENERATION_FILE in files:
        read_generation(files[GENERATION_FILE], where, num_embeddings)
    own = tokenizer_files(files)
    if not own:
        return
    if not without_template(own):
        own = {**read_tokenizer_files(base_dir), **own}
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as scratch:
        write_tokenizer(own, base_dir, Path(scratch))
        tokenizer = LoadedTokenizer.load(Path(scratch), where)
    with _failures_of(where), _named(where):
        probe(tokenizer)
        _try_template(tokenizer)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Put a name before the errors of a tokenizer, which knows none."""
    try:
        yield
    except ArtifactError as error:
        raise error.about(where) from error


def _failures_of(where: str) -> AbstractContextManager[None]:
    return failures_as(lambda reason: ArtifactError(f"{where}: its tokenizer cannot be used: {reason}"))
