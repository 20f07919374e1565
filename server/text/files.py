"""The files of a variant that handling its text needs, and their limits. Parses no file."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from deltastore.errors import ArtifactError
from deltastore.format.manifest import GENERATION_FILE, TOKENIZER_FILES

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
