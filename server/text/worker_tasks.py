"""Functions that run in worker processes, on tenants' files: load, encode, render, decode, check. Imports no torch.

Loaded tokenizers stay in the worker's memory within a bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from deltastore.errors import ArtifactError, PeraxisError
from deltastore.format.files import GENERATION_FILE, NAMED_TEMPLATE, is_tokenizer_file, tokenizer_paths
from server.errors import InvalidRequest
from server.fairness import FairCache
from server.text.chat_template import Conversation
from server.text.failures import failures_as
from server.text.generation_config import read_generation
from server.text.tokenizer import LoadedTokenizer

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
    most = MAX_BYTES.get(TEMPLATE_FILE if is_template(name) else name, num_bytes)
    if num_bytes > most:
        raise ArtifactError(
            f"{where}: its {name} has {num_bytes} bytes, more than {most}: leave out what no request uses"
        )


def tokenizer_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that belong to the tokenizer."""
    return {name: content for name, content in files.items() if is_tokenizer_file(name)}


def is_template(name: str) -> bool:
    """Return True for the name of a file that is a chat template."""
    return name == TEMPLATE_FILE or NAMED_TEMPLATE.fullmatch(name) is not None


def without_templates(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return tokenizer files but those that are chat templates."""
    return {name: content for name, content in files.items() if not is_template(name)}


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint."""
    return {name: path.read_bytes() for name, path in tokenizer_paths(directory).items()}


def digests_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def content_key(digests: Mapping[str, str]) -> str:
    """Return a name for the content of tokenizer files, given their digests: equal files are loaded once."""
    return hashlib.sha256(
        "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    ).hexdigest()


def write_file(directory: Path, name: str, content: bytes) -> None:
    """Write a tokenizer's file below a directory."""
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(content)


def write_tokenizer(files: Mapping[str, bytes], base_dir: Path, directory: Path) -> None:
    """Write tokenizer files, and the base's model config, to a directory that transformers can load."""
    for name, content in tokenizer_files(files).items():
        write_file(directory, name, content)
    shutil.copy(base_dir / MODEL_CONFIG_FILE, directory)


# Modules that a worker of `server.workers.pool` imports before its first task.
WORKER_MODULES = ("server.text.without_torch", "server.text.worker_tasks")
# Bound on loaded tokenizers in one worker, of all tenants. The newest one stays whatever its size is.
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


class LoadedTokenizers:
    """The tokenizers that this process has loaded, by the content of their files."""

    def __init__(self) -> None:
        # None while it is loaded.
        self._tokenizers: FairCache[str, LoadedTokenizer | None] = FairCache(CACHE_BYTES)

    def get(self, key: str, directory: Path | None, owner: str, where: str) -> LoadedTokenizer:
        """Return a tokenizer; load it from `directory` if need be, for a tenant."""
        if (found := self._tokenizers.get(key)) is not None:
            return found
        if directory is None:
            raise NotLoaded(f"{where}: its tokenizer is not loaded in this worker")
        num_bytes = BYTES_PER_FILE_BYTE * sum(
            path.stat().st_size for path in tokenizer_paths(directory).values()
        )
        # Others go before it takes memory.
        self._tokenizers.put(key, None, owner, num_bytes)
        try:
            tokenizer = LoadedTokenizer.load(directory, where)
        except BaseException:
            self._tokenizers.drop(key)
            raise
        self._tokenizers.put(key, tokenizer, owner, num_bytes)
        return tokenizer


_loaded = LoadedTokenizers()


def with_tokenizer(
    key: str,
    directory: Path | None,
    owner: str,
    where: str,
    function: Callable[[LoadedTokenizer, *Ts], T],
    args: tuple[*Ts],
) -> T:
    """Call ``function(tokenizer, *args)`` with a loaded tokenizer.

    Args:
        key: the name of its content.
        directory: its files; None if this worker should have it loaded.
        owner: the tenant whose work it is, and which it counts for once it is loaded.
        where: the variant's name in error messages.

    Raises:
        NotLoaded: `directory` is None and the tokenizer is not loaded.
        ArtifactError: it cannot be loaded.
        PeraxisError: as `function` raises it.
    """
    with _failures_of(where):
        tokenizer = _loaded.get(key, directory, owner, where)
        with _named(where):
            return function(tokenizer, *args)


def probe(tokenizer: LoadedTokenizer) -> None:
    """Encode and decode a text; ArtifactError if the tokenizer cannot."""
    try:
        ids = tokenizer.encode(PROBE_TEXT, PROBE_TOKENS, True, "probe")
    except InvalidRequest as error:
        raise ArtifactError(f"its tokenizer cannot be used: {error}") from error
    tokenizer.decode(ids)
    tokenizer.token_texts(ids)


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
    if not without_templates(own):
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
