"""Records of calibration text as token ids: from a text file, a file of JSON lines, or a data set of the hub.

Reads sources and applies a tokenizer; does not cut or batch sequences, and runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from compressor.io.sources import HUB_ID
from deltastore.errors import CheckpointError, UsageError

DATASETS = {"c4": ("allenai/c4", "en")}  # short names, and the hub's name and configuration
RECORD_KEYS = 'a record is {"text"}, {"prompt", "completion"} or {"messages"}'
DATE = "01 Jan 2025"  # chat templates write today's date unless they are given another
MAX_REASON_CHARS = 200


def records(source: str, tokenizer: Any, max_chars: int) -> Iterator[list[int]]:
    """Yield the ids of each record of a source.

    Args:
        source: a .jsonl or .json file of records, another file of plain text, or a data set as NAME or NAME:CONFIG.
        max_chars: how much of a text file is read.

    Raises:
        UsageError: no such file or data set, or a record of another form.
        CheckpointError: chat records, and a tokenizer without a chat template.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json"):
        return (_record_ids(record, where, tokenizer) for where, record in _json_lines(path))
    if path.is_file() or path.suffix == ".txt":
        return iter([list(tokenizer(_read_text(path, max_chars), verbose=False)["input_ids"])])
    return (_record_ids(record, where, tokenizer) for where, record in _dataset(source))


def chat_text(messages: Any, where: str, tokenizer: Any) -> str:
    """Render a conversation by the tokenizer's chat template.

    Args:
        where: names the record in errors.

    Raises:
        UsageError: messages of another form, or that the template refuses.
        CheckpointError: no chat template.
    """
    # Deferred, because only chat records need it.
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise CheckpointError(
            f"{where}: the fine-tune has no chat template: give records of text, or --calibration self"
        )
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f"{where}: messages are a list of objects with role and content")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE))
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{where}: the fine-tune's chat template refuses these messages: {_reason(error)}"
        ) from error


def _read_text(path: Path, max_chars: int) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(max_chars)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if not text.strip():
        raise UsageError(f"{path}: it holds no text: give another file, or --calibration self")
    return text


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the position of each record, for errors, and the record."""
    is_empty = True
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    is_empty = False
                    yield f"{path}: line {number}", _parse(line, f"{path}: line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if is_empty:
        raise UsageError(f"{path}: it holds no records: give another file, or --calibration self")


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: no JSON: {error}") from error


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> UsageError:
    if isinstance(error, UnicodeDecodeError):
        return UsageError(f"{path}: it is not UTF-8 text (byte {error.start}): convert it first")
    return UsageError(f"{path}: {error.strerror}: give --calibration a text file or a .jsonl file")


def _dataset(source: str) -> Iterator[tuple[str, Any]]:
    """Yield the number of each record of a data set's training part, for errors, and the record; streamed."""
    name, _, config = source.partition(":")
    if not HUB_ID.fullmatch(name):
        raise UsageError(
            f"--calibration {source}: no such file, and no data set's name: give a .txt or .jsonl file, self or none"
        )
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"--calibration {source}: data sets need the datasets library: pip install 'peraxis[eval]', "
            "or give a file, or self"
        ) from error
    # Deferred, because only data sets of the hub need it.
    import httpx

    name, default = DATASETS.get(name, (name, ""))
    try:
        stream = datasets.load_dataset(name, config or default or None, split="train", streaming=True)
        for number, record in enumerate(stream, 1):
            yield f"{source}: record {number}", record
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"--calibration {source}: the hub does not give this data set ({_reason(error)}): give a file, or self"
        ) from error


def _record_ids(record: Any, where: str, tokenizer: Any) -> list[int]:
    """Return a record's ids; a completion is followed by the end token, as where such records are trained on."""
    if not isinstance(record, dict):
        raise UsageError(f"{where}: {RECORD_KEYS}")
    if "messages" in record:
        text = chat_text(record["messages"], where, tokenizer)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    parts = [record[key] for key in ("prompt", "completion") if key in record]
    parts = parts if len(parts) == 2 else [record.get("text")]
    if not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{where}: {RECORD_KEYS}")
    ids = list(tokenizer("".join(parts), verbose=False)["input_ids"])
    end = tokenizer.eos_token_id
    return [*ids, end] if len(parts) == 2 and end is not None and ids[-1:] != [end] else ids


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]
