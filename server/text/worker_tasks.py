"""Functions that run in worker processes, on tenants' files: load, encode, render, decode, check. Imports no torch.

Loaded tokenizers stay in the worker's memory within a bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from deltastore.errors import ArtifactError, PeraxisError
from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES
from server.errors import InvalidRequest
from server.text.generation_config import read_generation
from server.text.tokenizer import Conversation, LoadedTokenizer, failures_as

TEMPLATE_FILE = "chat_template.jinja"
# transformers chooses a tokenizer's class by the model config.
MODEL_CONFIG_FILE = "config.json"
MEGABYTE = 1 << 20
# Larger than those of any known model: Gemma's tokenizer.json has 33 MB, and 30,000 added tokens make 6 MB of config.
MAX_BYTES: Mapping[str, int] = {
    "tokenizer.json": 64 * MEGABYTE, "tokenizer_config.json": 16 * MEGABYTE, "special_tokens_map.json": 4 * MEGABYTE,
    "added_tokens.json": 8 * MEGABYTE, "vocab.json": 16 * MEGABYTE, "merges.txt": 16 * MEGABYTE,
    "vocab.txt": 16 * MEGABYTE, "tokenizer.model": 16 * MEGABYTE, "spiece.model": 16 * MEGABYTE,
    TEMPLATE_FILE: MEGABYTE, GENERATION_FILE: MEGABYTE,
}  # fmt: skip


def check_sizes(files: Mapping[str, bytes], where: str) -> None:
    """Refuse a file that is larger than any model's; ArtifactError names it."""
    for name, content in files.items():
        check_size(name, len(content), where)


def check_size(name: str, num_bytes: int, where: str) -> None:
    """Refuse a file that is larger than any model's; ArtifactError names it."""
    if num_bytes > MAX_BYTES.get(name, num_bytes):
        raise ArtifactError(
            f"{where}: its {name} has {num_bytes} bytes, more than {MAX_BYTES[name]}: leave out what no request uses"
        )


def tokenizer_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that belong to the tokenizer, in a fixed order."""
    return {name: files[name] for name in TOKENIZER_FILES if name in files}


def without_template(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return tokenizer files but the chat template's own."""
    return {name: content for name, content in files.items() if name != TEMPLATE_FILE}


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint."""
    paths = {name: directory / name for name in TOKENIZER_FILES}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def digests_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def content_key(digests: Mapping[str, str]) -> str:
    """Return a name for the content of tokenizer files, given their digests: equal files are loaded once."""
    return hashlib.sha256(
        "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    ).hexdigest()


def write_tokenizer(files: Mapping[str, bytes], base_dir: Path, directory: Path) -> None:
    """Write tokenizer files, and the base's model config, to a directory that transformers can load."""
    for name, content in tokenizer_files(files).items():
        (directory / name).write_bytes(content)
    shutil.copy(base_dir / MODEL_CONFIG_FILE, directory)


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
