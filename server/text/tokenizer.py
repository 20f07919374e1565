"""Text to ids and back, with each variant's own tokenizer, chat template and generation defaults.

Runs on request threads, never on the engine's. A variant's files come from strangers: they are loaded without any code
of theirs, and a panic inside the tokenizer library fails the one request.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from deltastore.base.base import Base
from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import ArtifactError
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest, NotServable
from server.sampling_params import SamplingParams
from server.text.templates import TemplateWorker

CACHED = 64  # tokenizers kept; a few megabytes each

# What requests take from a variant's generation config, and as what.
DEFAULTED: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class VariantTokenizer:
    """One variant's way between text and ids."""

    tokenizer: PreTrainedTokenizerFast
    num_embeddings: int  # ids below this have a row in the variant's embedding
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, Any]
    worker: TemplateWorker

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer itself adds."""
        return guarded(lambda: list(self.tokenizer(text)["input_ids"]), "prompt")

    def render_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation through the variant's chat template, up to the assistant's turn."""
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            raise InvalidRequest("there is no chat template here: send a prompt instead", "messages")
        text = self.worker.render(template, messages, dict(self.tokenizer.special_tokens_map))
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest("the chat template makes text that is no Unicode", "messages")
        return guarded(lambda: list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), "messages")

    def decode(self, ids: list[int]) -> str:
        return guarded(lambda: str(self.tokenizer.decode(ids, skip_special_tokens=True)), "tokens")


class Tokenizers:
    """The tokenizers of the base and of variants, loaded once and kept by digest. Thread-safe."""

    def __init__(self, base_dir: Path, base: Base, registry: Registry, worker: TemplateWorker) -> None:
        self._base_dir = base_dir
        self._base_shapes = base
        self._registry = registry
        self._worker = worker
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, VariantTokenizer] = OrderedDict()
        self._base_generation = _base_generation(base_dir)
        self._base = self._make(base_dir, base.shapes[base.embedding or ""][0], self._base_generation)

    def of(self, record: VersionRecord | None) -> VariantTokenizer:
        """The tokenizer of a version, or of the base."""
        if record is None:
            return self._base
        with self._lock:
            if record.digest in self._cache:
                self._cache.move_to_end(record.digest)
                return self._cache[record.digest]
        with Artifact.open(self._registry.object_path(record.digest), record.name) as artifact:
            loaded = self._load(artifact)
        with self._lock:
            self._cache[record.digest] = loaded
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return loaded

    def check(self, artifact: Artifact) -> None:
        """Load an uploaded artifact's tokenizer once, before it is published: ArtifactError if it does not work."""
        self._load(artifact).encode("probe")

    def close(self) -> None:
        """End the child process that renders templates."""
        self._worker.close()

    def _load(self, artifact: Artifact) -> VariantTokenizer:
        spec = artifact.manifest.tensors.get(self._base_shapes.embedding or "")
        rows = self._base.num_embeddings if spec is None else spec.shape[0]
        generation = self._base_generation
        if GENERATION_FILE in artifact.manifest.files:
            generation = _generation(artifact.file(GENERATION_FILE), artifact.where)
        files = [name for name in artifact.manifest.files if name in TOKENIZER_FILES]
        if not files:
            return _with(self._base, rows, generation)
        with tempfile.TemporaryDirectory(prefix="peraxis-tokenizer-") as scratch:
            directory = Path(scratch)
            for name in files:
                (directory / name).write_bytes(artifact.file(name))
            shutil.copy(self._base_dir / "config.json", directory)  # tells the library the tokenizer's class
            try:
                return self._make(directory, rows, generation)
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

    def _make(self, directory: Path, rows: int, generation: Mapping[str, Any]) -> VariantTokenizer:
        tokenizer = guarded(
            lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False), "tokenizer"
        )
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise NotServable(f"{directory}: no tokenizer.json: save the tokenizer in its fast form first")
        return _with(VariantTokenizer(tokenizer, rows, frozenset(), {}, self._worker), rows, generation)


def _with(base: VariantTokenizer, rows: int, generation: Mapping[str, Any]) -> VariantTokenizer:
    eos = generation.get("eos_token_id")
    ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    return VariantTokenizer(base.tokenizer, rows, ids, sampling_defaults(generation), base.worker)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation config means for requests that do not say: greedy unless it samples, as `generate()` does."""
    given = {name: kind for name, kind in DEFAULTED.items() if generation.get(name) is not None}
    defaults: dict[str, Any] = {name: kind(generation[name]) for name, kind in given.items()}
    if not generation.get("do_sample"):
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    return defaults


def _base_generation(base_dir: Path) -> Mapping[str, Any]:
    path = base_dir / GENERATION_FILE
    if path.exists():
        return _generation(path.read_bytes(), str(path))
    config = Checkpoint.open(base_dir).config
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _generation(raw: bytes, where: str) -> Mapping[str, Any]:
    """A generation config, read through the library's own class and checked for what requests will use."""
    try:
        document = json.loads(raw)
        GenerationConfig.from_dict(document)
        eos = document.get("eos_token_id")
        if not (eos is None or isinstance(eos, int) or all(isinstance(token, int) for token in eos)):
            raise ValueError("eos_token_id must be an id or a list of ids")
        for name, kind in DEFAULTED.items():
            value = document.get(name, 0) or 0
            if isinstance(value, bool) or not isinstance(value, (int, kind)):
                raise ValueError(f"{name} must not be {value!r}")
        SamplingParams(**sampling_defaults(document))
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidRequest) as error:
        raise ArtifactError(f"{where}: its {GENERATION_FILE} cannot be used: {error}"[:500]) from error
    return dict(document)


def guarded(call: Callable[[], T], param: str) -> T:
    """Run tokenizer code; a Rust panic, which is no `Exception`, fails this request and nothing else."""
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"the tokenizer failed: {error}"[:500], param) from error
