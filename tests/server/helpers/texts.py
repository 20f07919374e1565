"""A base's tokenizer, variants with files of their own, and a text service on them, without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from server.registry_calls import RegistryCalls, probe
from server.text.service import TextService, text_pool
from server.text.worker_tasks import read_tokenizer_files
from server.workers.pool import WorkerPool
from tests.deltastore.helpers.stored import EMBEDDING, ROWS, publish_file, write_stored
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer

WAIT_S = 240.0

# As a variant's tokenizer config has it.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
        "content": {},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Texts:
    """A base and a registry, with short calls for tests."""

    base_dir: Path
    registry: Registry
    directory: Path

    def publish(self, files: Mapping[str, bytes]) -> VersionRecord:
        """Publish a variant that carries these files; unchecked, as an older version may have done."""
        path = self.directory / f"{len(list(self.directory.iterdir()))}.safetensors"
        write_stored(path, dict(files))
        return publish_file(self.registry, path)

    def run(self, test: Callable[[TextService, WorkerPool], Awaitable[None]], num_workers: int = 2) -> None:
        """Run `test` with a text service and its pool."""

        async def body() -> None:
            pool = text_pool(num_workers)
            calls = RegistryCalls(str(self.registry.root), partial(probe, self.registry))
            service = TextService(self.base_dir, self.registry, calls, pool, EMBEDDING, 300)
            try:
                async with asyncio.timeout(WAIT_S):
                    await test(service, pool)
            finally:
                service.close()
                await pool.close()

        asyncio.run(body())


def make_texts(directory: Path, base: PreTrainedTokenizerFast | None = None) -> Texts:
    """Make a base with one token per byte and a chat template, or with the given tokenizer."""
    base_dir = directory / "base"
    (base or make_tokenizer(chat_template=CHAT_TEMPLATE)).save_pretrained(base_dir)
    (base_dir / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 257}))
    (directory / "artifacts").mkdir()
    return Texts(base_dir, Registry(directory / "registry"), directory / "artifacts")


def files_of(tokenizer: PreTrainedTokenizerFast, directory: Path) -> dict[str, bytes]:
    """Return the files that a tokenizer is saved as."""
    tokenizer.save_pretrained(directory)
    return read_tokenizer_files(directory)


def changed(files: Mapping[str, bytes], **parts: Any) -> dict[str, bytes]:
    """Return tokenizer files with other parts of `tokenizer.json`, such as its normalizer."""
    document = json.loads(files["tokenizer.json"])
    return {**files, "tokenizer.json": json.dumps({**document, **parts}).encode()}


def replace(pattern: str, content: str) -> dict[str, Any]:
    """Return a step of a normalizer or decoder that replaces a string."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(kind: str, *steps: Any) -> dict[str, Any]:
    """Return a sequence of steps; `kind` is ``normalizers`` or ``decoders``."""
    return {"type": "Sequence", kind: list(steps)}


__all__ = [
    "EMBEDDING", "RESPONSE_TEMPLATE", "ROWS", "Texts", "changed", "files_of", "make_texts", "replace", "sequence",
]  # fmt: skip
