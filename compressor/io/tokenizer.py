"""Load a checkpoint's own tokenizer. Runs no code that the checkpoint brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltastore.errors import CheckpointError
from deltastore.format.manifest import TOKENIZER_FILES

# Raised by transformers for damaged files of a tokenizer.
DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError)
MAX_REASON_CHARS = 200


def has_tokenizer(directory: Path) -> bool:
    """Return True if a checkpoint has any of a tokenizer's files."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(directory: Path) -> Any:
    """Return the checkpoint's transformers tokenizer.

    Raises:
        CheckpointError: no tokenizer, or one that cannot be loaded.
    """
    # Deferred, because the import takes seconds.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except BaseException as error:
        # tokenizers raises plain `Exception` for files that it cannot read.
        if type(error) is not Exception and not isinstance(error, DAMAGED):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {reason}") from error
