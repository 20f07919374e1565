"""The header of a safetensors file, read strictly and written in layer order. Must not know codecs or manifests.

A file is an 8-byte little-endian length, that many bytes of JSON and one contiguous data section, as the safetensors
project documents it. The safetensors package would reorder tensors and align the data to eight bytes; this module keeps
layer order and aligns it to 4096. Reading a hostile file raises one clear error per defect.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isinf, prod
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from deltastore.errors import ArtifactError, shown

ALIGNMENT = 4096
MAX_HEADER_BYTES = 32 << 20
# A longer header is allowed only in proportion to the file, so that a short file cannot take seconds of parsing.
FREE_HEADER_BYTES = 1 << 20
MAX_HEADER_SHARE = 32
# A bound on bytes is not enough: a parsed value takes up to a hundred times the memory of its text.
MAX_JSON_VALUES = 2_000_000
MAX_DIGITS = 20
MAX_NAME_CHARS = 512
MAX_RANK = 8
MAX_SIZE = 1 << 62
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
METADATA_KEY = "__metadata__"
JSON_SPACE = b" \t\r\n"
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


# A struct, because a header may hold a hundred thousand of them; not looked at by the garbage collector.
class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a file; `start` and `end` are bytes from the beginning of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file, checked against the file's size."""

    tensors: dict[str, TensorEntry]  # in the order of their bytes
    metadata: Mapping[str, str]
    data_start: int  # bytes from the beginning of the file

    @property
    def data_bytes(self) -> int:
        return next((entry.end for entry in reversed(self.tensors.values())), 0)


def encode_header(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Encode a header, padded with spaces so that the data section begins at a multiple of 4096."""
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    for entry in entries:
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def open_file(path: Path, where: str) -> int:
    """Open a file for reading, without blocking on a pipe.

    Raises:
        ArtifactError: The file cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        # The name holds a NUL.
        raise ArtifactError(f"{where}: {error}") from error


def read_header(fd: int, where: str) -> Header:
    """Read and check the header of an open file.

    Args:
        fd: A descriptor open for reading; its position is not moved.
        where: The file's name in messages.

    Raises:
        ArtifactError: The first defect of the file, in one line.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{where}: not a regular file")
    size = status.st_size
    if size < 8:
        raise ArtifactError(
            f"{where}: {size} bytes are not a safetensors file, which begins with an 8-byte header length"
        )
    (length,) = struct.unpack("<Q", read_exactly(fd, 8, 0, where))
    _check_header_length(length, size, where)
    if 8 + length > size:
        raise ArtifactError(
            f"{where}: truncated: its header needs {8 + length} bytes and the file has {size}"
        )
    raw = read_exactly(fd, length, 8, where)
    entries, metadata = _common_form(raw, where) or _any_form(raw, where)
    entries.sort(key=attrgetter("start", "end"))
    _check_contiguous(entries, size - 8 - length, where)
    return Header({entry.name: entry for entry in entries}, metadata, 8 + length)


def check_prefix(first_bytes: bytes, size_limit: int, where: str = "the upload") -> None:
    """Check the first bytes of a file, so that an upload of anything else is refused before it is stored.

    Args:
        first_bytes: At least the first 9 bytes decide; with fewer, what can be told from them is checked.
        size_limit: The most bytes that the whole file can have: its announced length, or the largest upload.
        where: The file's name in messages.

    Raises:
        ArtifactError: No file of at most `size_limit` bytes that begins so is safetensors.
    """
    if len(first_bytes) >= 8:
        _check_header_length(struct.unpack_from("<Q", first_bytes)[0], size_limit, where)
    if len(first_bytes) > 8:
        _check_brace(first_bytes[8:9], where)


def parse_verified_header(raw: bytes) -> Header:
    """Parse the header of a file that `read_header` accepted when it was published. Nothing is checked again.

    Args:
        raw: The file's bytes before its data section, verified against the digests of its version record.
    """
    document = json.loads(raw[8:])
    metadata = document.pop(METADATA_KEY, {})
    entries = {
        name: TensorEntry(name, value["dtype"], tuple(value["shape"]), *value["data_offsets"])
        for name, value in document.items()
    }
    return Header(entries, metadata, len(raw))


def read_into(fd: int, target: memoryview, offset: int, where: str) -> None:
    """Fill `target` from byte `offset` of a file with `pread`.

    Raises:
        ArtifactError: The file is too short.
    """
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise ArtifactError(
                f"{where}: truncated: it ends {len(target) - done} bytes before byte {offset + len(target)}"
            )
        done += count


def read_exactly(fd: int, num_bytes: int, offset: int, where: str) -> bytes:
    """Read `num_bytes` bytes from byte `offset`; raises as `read_into` does."""
    content = bytearray(num_bytes)
    read_into(fd, memoryview(content), offset, where)
    return bytes(content)


def parse_json(raw: bytes | str, where: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON in UTF-8; refuse duplicate keys, NaN, infinity, lone surrogates, and too many values or levels.

    Args:
        parse_constant: Returns the value of NaN and infinities, which are then allowed.

    Raises:
        ArtifactError: The text is not such JSON.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        if num_values(text) > MAX_JSON_VALUES:
            raise ValueError(f"more than {MAX_JSON_VALUES} values")
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=parse_constant or _no_number,
            parse_float=_finite,
            parse_int=_short,
        )
        # A lone surrogate cannot be encoded, so it could be neither stored nor sent.
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ArtifactError(f"{where}: its JSON is nested too deeply") from error
    except ValueError as error:
        raise ArtifactError(f"{where}: its JSON cannot be read: {error}") from error
    return document


def num_values(text: str | bytes) -> int:
    """Bound the number of values of a JSON text."""
    if isinstance(text, str):
        return text.count(",") + text.count("[") + text.count("{")
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = sorted(key for key, _ in pairs)
        twice = next(first for first, second in pairwise(names) if first == second)
        raise ValueError(f"key {shown(twice)} stands twice")
    return keys


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"the number {shown(text)} is not allowed")


def _finite(text: str) -> float:
    return _no_number(text) if isinf(value := float(text)) else value


def _short(text: str) -> int:
    return _no_number(text) if len(text) > MAX_DIGITS else int(text)


_Size = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIZE)]


class _Fields(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The value of one tensor in a header."""

    dtype: Literal[tuple(DTYPE_BYTES)]  # type: ignore[valid-type]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


RAW_VALUES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELDS = msgspec.json.Decoder(list[_Fields])


def _common_form(raw: bytes, where: str) -> tuple[list[TensorEntry], dict[str, str]] | None:
    """Read a header as tools write it, without spaces and escapes, in a tenth of the time of `_any_form`.

    None for every header of which it is not sure; `_any_form` reads it or names its defect. msgspec keeps the last of
    equal keys, so they are found by what is lost: what it keeps must be as long as the text, and a key of `ENTRY_KEYS`
    must be there once for each tensor.

    Raises:
        ArtifactError: the first defect of the metadata.
    """
    text = raw.rstrip(JSON_SPACE)
    if not text.startswith(b"{") or num_values(text) > MAX_JSON_VALUES:
        return None
    try:
        values = RAW_VALUES.decode(text)
        names = "".join(values)
        length = len(names.encode()) + sum(map(len, values.values())) + len('"":,') * len(values) + len("}")
        metadata = values.pop(METADATA_KEY, msgspec.Raw(b"{}"))
        fields = b"[%b]" % b",".join(values.values())
        parsed = _FIELDS.decode(fields)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if (
        length != len(text)
        or b"\\" in fields
        or any(fields.count(b'"%b"' % key.encode()) != len(values) for key in ENTRY_KEYS)
        or not names.isprintable()
        or not all(0 < len(name) <= MAX_NAME_CHARS for name in values)
    ):
        return None
    entries = []
    for name, own in zip(values, parsed, strict=True):
        start, end = own.data_offsets
        # No size is 0, so the bytes bound their product.
        if start >= end or prod(own.shape) * DTYPE_BYTES[own.dtype] != end - start:
            return None
        entries.append(TensorEntry(name, own.dtype, own.shape, start, end))
    return entries, _metadata(parse_json(bytes(metadata), f"{where}: header"), where)


def _any_form(raw: bytes, where: str) -> tuple[list[TensorEntry], dict[str, str]]:
    _check_brace(raw, where)
    document = parse_json(raw, f"{where}: header")
    assert isinstance(document, dict)
    metadata = _metadata(document.pop(METADATA_KEY, {}), where)
    return [_entry(name, value, where) for name, value in document.items()], metadata


def _check_header_length(length: int, size: int, where: str) -> None:
    limit = min(MAX_HEADER_BYTES, FREE_HEADER_BYTES + size // MAX_HEADER_SHARE)
    if length > limit:
        raise ArtifactError(
            f"{where}: not a safetensors file, or a damaged one: its header claims {length} bytes, more than the "
            f"{limit} allowed in a file of {size}"
        )


def _check_brace(raw: bytes, where: str) -> None:
    if not raw.startswith(b"{"):
        raise ArtifactError(f"{where}: not a safetensors file: its header does not begin with '{{'")


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ArtifactError(f"{where}: {METADATA_KEY} must map names to strings")
    return value


def _entry(name: str, value: Any, where: str) -> TensorEntry:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ArtifactError(
            f"{where}: tensor name {shown(name)} is not 1 to {MAX_NAME_CHARS} characters that can be printed"
        )

    def bad(what: str) -> ArtifactError:
        return ArtifactError(f"{where}: tensor {shown(name)} {what}")

    if not isinstance(value, dict) or value.keys() != ENTRY_KEYS:
        raise bad("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise bad(f"has the unknown dtype {shown(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK or prod(size or 1 for size in shape) >= MAX_SIZE:
        raise bad(f"has the malformed shape {shown(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise bad(f"has the malformed data_offsets {shown(offsets)}")
    if prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
        raise bad(f"of shape {shape} and dtype {dtype} does not fill its {offsets[1] - offsets[0]} bytes")
    return TensorEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < MAX_SIZE for item in value)


def _check_contiguous(entries: list[TensorEntry], data_bytes: int, where: str) -> None:
    position = 0
    for entry in entries:
        if entry.start != position:
            kind = "overlaps another" if entry.start < position else "leaves a hole before it"
            raise ArtifactError(
                f"{where}: tensor {shown(entry.name)} {kind}: it begins at {entry.start}, expected {position}"
            )
        position = entry.end
    if position > data_bytes:
        raise ArtifactError(
            f"{where}: truncated: its tensors need {position} data bytes and {data_bytes} are there"
        )
    if position < data_bytes:
        raise ArtifactError(f"{where}: {data_bytes - position} bytes follow its last tensor")
