"""Names of the files that an artifact carries: a tokenizer's, its chat templates, and the generation config."""

from __future__ import annotations

import re
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
)  # fmt: skip
# Chat templates with names, as transformers saves them.
NAMED_TEMPLATES = "additional_chat_templates"
NAMED_TEMPLATE = re.compile(NAMED_TEMPLATES + r"/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\.jinja", re.ASCII)
MAX_NAMED_TEMPLATES = 8
GENERATION_FILE = "generation_config.json"
FILES = (*TOKENIZER_FILES, GENERATION_FILE)
MAX_FILES = len(FILES) + MAX_NAMED_TEMPLATES


def is_tokenizer_file(name: str) -> bool:
    """Return True for the name of a tokenizer's file that an artifact may carry."""
    return name in TOKENIZER_FILES or NAMED_TEMPLATE.fullmatch(name) is not None


def tokenizer_paths(directory: Path) -> dict[str, Path]:
    """Return the paths of the tokenizer's files in a checkpoint's directory by their names, in a fixed order."""
    named = sorted(f"{NAMED_TEMPLATES}/{path.name}" for path in directory.glob(f"{NAMED_TEMPLATES}/*.jinja"))
    paths = {name: directory / name for name in (*TOKENIZER_FILES, *filter(is_tokenizer_file, named))}
    return {name: path for name, path in paths.items() if path.is_file()}
