"""Encodes prompts and decodes tokens with each variant's own tokenizer, chat template and generation defaults.

Runs on request threads, never on the engine thread. Tenants' files are loaded without their code, and a panic inside
the tokenizers package fails one request. Knows no engine.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deltastore.base.base import Base
from deltastore.errors import ArtifactError, VariantNotFound, VariantQuarantined
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest, NotServable
from server.text.generation_config import (
    base_generation_config,
    eos_token_ids,
    parse_generation_config,
    sampling_defaults,
)
from server.text.templates import TemplateWorker

MAX_CACHED = 64  # tokenizers of a few megabytes each

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class VariantTokenizer:
    """Tokenizer, chat template and generation defaults of one variant or of the base."""

    tokenizer: PreTrainedTokenizerFast
    num_embeddings: int  # rows of the variant's embedding; token ids are below it
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, Any]  # fields of `SamplingParams`
    worker: TemplateWorker

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the tokenizer adds."""
        return guarded(lambda: list(self.tokenizer(text)["input_ids"]), "prompt")

    def render_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation rendered by the chat template, up to the assistant's turn."""
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            raise InvalidRequest("there is no chat template here: send a prompt instead", "messages")
        text = self.worker.render(template, messages, dict(self.tokenizer.special_tokens_map))
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest("the chat template makes text that is no Unicode", "messages")
        return guarded(lambda: list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), "messages")

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return guarded(lambda: str(self.tokenizer.decode(ids, skip_special_tokens=True)), "tokens")


class Tokenizers:
    """Tokenizers of the base and of variants, loaded once and cached by digest. Thread-safe."""

    def __init__(self, base_dir: Path, base: Base, registry: Registry, worker: TemplateWorker) -> None:
        self._base_dir = base_dir
        self._base_shapes = base
        self._registry = registry
        self._worker = worker
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, VariantTokenizer] = OrderedDict()
        self._base_generation = base_generation_config(base_dir)
        self._base = self._load_files(base_dir, base.shapes[base.embedding or ""][0], self._base_generation)

    def of(self, record: VersionRecord | None) -> VariantTokenizer:
        """Return the tokenizer of a version, or of the base; reads the version's object if it is not cached.

        Raises:
            VariantNotFound: the object is gone.
            VariantQuarantined: the object is corrupt; it was quarantined.
            ArtifactError: the object is intact and its tokenizer cannot be loaded.
        """
        if record is None:
            return self._base
        with self._lock:
            if record.digest in self._cache:
                self._cache.move_to_end(record.digest)
                return self._cache[record.digest]
        path = self._registry.object_path(record.digest)
        try:
            with Artifact.open(path, record.name) as artifact:
                loaded = self._load(artifact)
        except ArtifactError as error:
            self._check_object(record, path, error)
            raise
        with self._lock:
            self._cache[record.digest] = loaded
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return loaded

    def check(self, artifact: Artifact) -> None:
        """Load and use the tokenizer of an uploaded artifact before it is published; ArtifactError if it fails."""
        self._load(artifact).encode("probe")

    def close(self) -> None:
        """End the process that renders chat templates."""
        self._worker.close()

    def _check_object(self, record: VersionRecord, path: Path, error: ArtifactError) -> None:
        """Raise VariantNotFound if an object is gone; quarantine it and raise VariantQuarantined if it is corrupt."""
        if not path.exists():
            raise VariantNotFound(
                f"{record.label}: its object is no longer in the registry: upload it again"
            ) from error
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != record.digest:
            self._registry.quarantine(record.digest, str(error))
            raise VariantQuarantined(
                f"{record.label}: its stored object is corrupt and was quarantined: upload it again"
            ) from error

    def _load(self, artifact: Artifact) -> VariantTokenizer:
        spec = artifact.manifest.tensors.get(self._base_shapes.embedding or "")
        num_embeddings = self._base.num_embeddings if spec is None else spec.shape[0]
        generation = self._base_generation
        if GENERATION_FILE in artifact.manifest.files:
            generation = parse_generation_config(artifact.file(GENERATION_FILE), artifact.where)
        files = [name for name in artifact.manifest.files if name in TOKENIZER_FILES]
        if not files:
            return self._make(self._base.tokenizer, num_embeddings, generation)
        with tempfile.TemporaryDirectory(prefix="peraxis-tokenizer-") as scratch:
            directory = Path(scratch)
            for name in files:
                (directory / name).write_bytes(artifact.file(name))
            # transformers chooses the tokenizer's class by the model config.
            shutil.copy(self._base_dir / "config.json", directory)
            try:
                return self._load_files(directory, num_embeddings, generation)
            except (
                OSError,
                TypeError,
                ValueError,
                KeyError,
                AttributeError,
                NotServable,
                InvalidRequest,
            ) as error:
                raise ArtifactError(
                    f"{artifact.where}: its tokenizer cannot be loaded: {error}"[:500]
                ) from error

    def _load_files(
        self, directory: Path, num_embeddings: int, generation: Mapping[str, Any]
    ) -> VariantTokenizer:
        tokenizer = guarded(
            lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False), "tokenizer"
        )
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise NotServable(f"{directory}: no tokenizer.json: save the tokenizer in its fast form first")
        return self._make(tokenizer, num_embeddings, generation)

    def _make(
        self, tokenizer: PreTrainedTokenizerFast, num_embeddings: int, generation: Mapping[str, Any]
    ) -> VariantTokenizer:
        defaults = sampling_defaults(generation)
        return VariantTokenizer(tokenizer, num_embeddings, eos_token_ids(generation), defaults, self._worker)


def guarded(call: Callable[[], T], param: str) -> T:
    """Call tokenizer code; turn a Rust panic, which is no `Exception`, into an InvalidRequest that names `param`."""
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"the tokenizer failed: {error}"[:500], param) from error
