"""Untrusted files: each is a change of a good artifact's bytes, with the message that the error must hold."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deltastore.errors import ArtifactError, PeraxisError
from deltastore.format.artifact import Artifact
from deltastore.format.header import FREE_HEADER_BYTES
from deltastore.format.manifest import MANIFEST_KEY
from deltastore.format.validate import check_artifact, check_base, check_size
from tests.helpers.tiny_artifact import BASE, NORM

LONGEST_MESSAGE = 400
Document = dict[str, Any]
Change = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Hostile:
    """One hostile file: a change of a good artifact, and a part of the expected message."""

    name: str
    change: Change  # from the bytes of a good artifact
    says: str  # part of the error's message
    error: type[PeraxisError] = ArtifactError


def read_all(path: Path) -> None:
    """Open, check and read a whole artifact, as an upload and then a load do."""
    with Artifact.open(path, "upload") as artifact:
        check_size(artifact, 1 << 20)
        check_base(artifact, BASE)
        check_artifact(artifact)
        for name, spec in artifact.manifest.tensors.items():
            if spec.codec == "onebit":
                assert artifact.onebit(name).dense().isfinite().all()
                artifact.added(name)
            else:
                artifact.whole(name)
        for filename in artifact.manifest.files:
            artifact.file(filename)


def assert_is_valid_or_refused(path: Path, raw: bytes) -> bool:
    """Read a file and return True if it is refused; anything but a PeraxisError ends the test."""
    path.write_bytes(raw)
    message = ""
    try:
        read_all(path)
    except PeraxisError as error:
        message = str(error)
    assert not message or message.isprintable()
    assert len(message) <= LONGEST_MESSAGE
    return bool(message)


def assert_is_refused(path: Path, hostile: Hostile, good: bytes) -> None:
    """Check that a good artifact, changed by `hostile`, is refused with the error that it names."""
    path.write_bytes(hostile.change(good))
    with pytest.raises(PeraxisError) as caught:
        read_all(path)
    message = str(caught.value)
    assert type(caught.value) is hostile.error
    assert message.startswith("upload: ")
    assert hostile.says in message
    assert message.isprintable()
    assert len(message) <= LONGEST_MESSAGE


@dataclass(slots=True)
class Part:
    """One tensor to be written to a file."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


def take_apart(raw: bytes) -> tuple[Document, bytes]:
    """Split a file into the header's JSON and the data section."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def assemble(header: Document | str | bytes, data: bytes = b"", alignment: int = 4096) -> bytes:
    """Build a file with any header text, well-formed or not."""
    if isinstance(header, dict):
        header = json.dumps(header)
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-(len(text) + 8) % alignment)
    return struct.pack("<Q", len(text)) + text + data


def with_header(change: Callable[[Document], object]) -> Change:
    """Change the header's JSON and leave the data."""

    def changed(raw: bytes) -> bytes:
        header, data = take_apart(raw)
        change(header)
        return assemble(header, data)

    return changed


def with_manifest(change: Callable[[Document], object]) -> Change:
    """Change the manifest's JSON and leave the rest."""

    def changed(header: Document) -> None:
        manifest = json.loads(header["__metadata__"][MANIFEST_KEY])
        change(manifest)
        header["__metadata__"][MANIFEST_KEY] = json.dumps(manifest)

    return with_header(changed)


def with_spec(name: str, **fields: Any) -> Change:
    """Change one tensor's spec in the manifest."""
    return with_manifest(lambda manifest: manifest["tensors"][name].update(fields))


def with_manifest_text(change: Callable[[str], str]) -> Change:
    """Change the manifest's text; the result need not be JSON."""

    def changed(header: Document) -> None:
        header["__metadata__"][MANIFEST_KEY] = change(header["__metadata__"][MANIFEST_KEY])

    return with_header(changed)


def with_entry(name: str, **fields: Any) -> Change:
    """Change one tensor's entry in the header."""
    return with_header(lambda header: header[name].update(fields))


def with_parts(change: Callable[[list[Part]], object]) -> Change:
    """Change the list of tensors; offsets and `device_bytes` are recomputed."""

    def changed(raw: bytes) -> bytes:
        old, data = take_apart(raw)
        header: Document = {"__metadata__": copy.deepcopy(old.pop("__metadata__"))}
        parts = [
            Part(name, entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in old.items()
        ]
        change(parts)
        position, device_bytes = 0, None
        for part in parts:
            if part.name.startswith("file.") and device_bytes is None:
                device_bytes = position
            end = position + len(part.data)
            header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [position, end]}
            position = end
        manifest = json.loads(header["__metadata__"][MANIFEST_KEY])
        manifest["device_bytes"] = position if device_bytes is None else device_bytes
        header["__metadata__"][MANIFEST_KEY] = json.dumps(manifest)
        return assemble(header, b"".join(part.data for part in parts))

    return changed


def with_part(name: str, dtype: str, shape: list[int], data: bytes) -> Change:
    """Replace one tensor by another and adapt its padding."""

    def changed(parts: list[Part]) -> None:
        index = next(index for index, part in enumerate(parts) if part.name == name)
        if parts[index + 1].name.startswith("padding."):
            del parts[index + 1]
        parts[index] = Part(name, dtype, shape, data)
        if padding := -len(data) % 16:
            parts.insert(index + 1, Part(f"padding.{900 + index}", "U8", [padding], bytes(padding)))

    return with_parts(changed)


def with_values(name: str, values: list[float], dtype: torch.dtype, at: int = 0) -> Change:
    """Overwrite some values of one tensor, counted from `at`."""
    new = bytes(torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint8).numpy())

    def changed(raw: bytes) -> bytes:
        header, data = take_apart(raw)
        start = header[name]["data_offsets"][0] + at * dtype.itemsize
        return raw[: len(raw) - len(data) + start] + new + raw[len(raw) - len(data) + start + len(new) :]

    return changed


def renamed(old: str, new: str) -> Change:
    """Rename a tensor and its parts in header and manifest."""

    def changed(raw: bytes) -> bytes:
        header, data = take_apart(raw)
        return assemble(json.dumps(header).replace(old, new), data)

    return changed


def compose(*changes: Change) -> Change:
    """Apply several changes in order."""

    def changed(raw: bytes) -> bytes:
        for change in changes:
            raw = change(raw)
        return raw

    return changed


def _entry_text(field: str, value: str) -> Change:
    """Put `value`, which need not be JSON that Python would write, into one header entry."""

    def changed(raw: bytes) -> bytes:
        header, data = take_apart(raw)
        header[NORM][field] = "HERE"
        return assemble(json.dumps(header).replace('"HERE"', value), data)

    return changed


def _twice(raw: bytes) -> bytes:
    header, data = take_apart(raw)
    text = json.dumps(header)
    return assemble(f'{text[:-1]},"{NORM}":{json.dumps(header[NORM])}}}', data)


def _named(name: str) -> Change:
    return with_header(lambda header: header.update({name: header.pop(NORM)}))


HEADERS = [
    Hostile("empty", lambda raw: b"", "0 bytes are not a safetensors file"),
    Hostile("seven bytes", lambda raw: raw[:7], "7 bytes are not a safetensors file"),
    Hostile("a picture", lambda raw: b"\x89PNG\r\n\x1a\n" + raw, "header claims 727905341920923785 bytes"),
    Hostile("a zip archive", lambda raw: b"PK\x03\x04\x14\x00\x08\x08" + raw, "not a safetensors file"),
    Hostile(
        "a pickle", lambda raw: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00" + raw, "not a safetensors file"
    ),
    Hostile("text", lambda raw: b"{}\n" * 100, "not a safetensors file"),
    Hostile("no JSON", lambda raw: assemble("model" * 9), "does not begin with '{'"),
    Hostile(
        "header just over the limit",
        lambda raw: struct.pack("<Q", FREE_HEADER_BYTES + 2) + bytes(32),
        "claims 1048578 bytes, more than the 1048577 allowed in a file of 40",
    ),
    Hostile("largest header length", lambda raw: b"\xff" * 8 + raw[8:], "header claims 18446744073709551615"),
    Hostile(
        "megabyte of zeros",
        lambda raw: struct.pack("<Q", FREE_HEADER_BYTES) + bytes(FREE_HEADER_BYTES),
        "does not begin",
    ),
    Hostile("truncated in the header", lambda raw: raw[:2000], "truncated: its header needs"),
    Hostile("truncated before the data", lambda raw: raw[:4096], "truncated: its tensors need 352"),
    Hostile("truncated in the data", lambda raw: raw[:-1], "and 351 are there"),
    Hostile("trailing bytes", lambda raw: raw + b"more", "4 bytes follow its last tensor"),
    Hostile("unfinished JSON", lambda raw: assemble('{"a": '), "JSON cannot be read: Expecting value"),
    Hostile("two documents", lambda raw: assemble("{}{}"), "Extra data"),
    Hostile("a list", lambda raw: assemble("[]"), "does not begin"),
    Hostile("UTF-16", lambda raw: assemble('{"a": 1}'.encode("utf-16")), "does not begin"),
    Hostile("no UTF-8", lambda raw: assemble(b'{"\xff\xfe": 1}'), "can't decode byte 0xff"),
    Hostile("half a surrogate pair", lambda raw: assemble('{"\\ud800": 1}'), "surrogates not allowed"),
    Hostile("deep JSON", lambda raw: assemble('{"a":' * 100_000), "nested too deeply"),
    Hostile("deep list", lambda raw: assemble('{"a":' + "[" * 1_000_000), "nested too deeply"),
    Hostile("nearly too deep a shape", _entry_text("shape", "[" * 800 + "]" * 800), "malformed shape"),
    Hostile("a name twice", _twice, "key 'model.norm.weight' stands twice"),
    Hostile(
        "a long key twice",
        lambda raw: assemble('{"' + "k" * 9999 + '":1,"' + "k" * 9999 + '":1}'),
        "stands twice",
    ),
    Hostile("NaN", _entry_text("shape", "[NaN]"), "the number 'NaN' is not allowed"),
    Hostile("infinity", _entry_text("shape", "[-Infinity]"), "the number '-Infinity' is not allowed"),
    Hostile("a float without end", _entry_text("shape", "[1e999]"), "the number '1e999' is not allowed"),
    Hostile("5000 digits", _entry_text("shape", f"[{'9' * 5000}]"), "is not allowed"),
    Hostile(
        "metadata that is null",
        with_header(lambda h: h.update(__metadata__=None)),
        "must map names to strings",
    ),
    Hostile(
        "metadata that nests",
        with_header(lambda h: h.update(__metadata__={"a": {}})),
        "must map names to strings",
    ),
    Hostile(
        "an entry that is a number", with_header(lambda h: h.update({NORM: 7})), "needs exactly dtype, shape"
    ),
    Hostile(
        "an entry without dtype", with_header(lambda h: h[NORM].pop("dtype")), "needs exactly dtype, shape"
    ),
    Hostile("an entry with more", with_entry(NORM, order="C"), "needs exactly dtype, shape"),
    Hostile("unknown dtype", with_entry(NORM, dtype="O"), "unknown dtype 'O'"),
    Hostile("dtype that is a list", with_entry(NORM, dtype=["F16"] * 999), "unknown dtype ['F16',"),
    Hostile("negative shape", with_entry(NORM, shape=[-10]), "malformed shape [-10]"),
    Hostile("float shape", with_entry(NORM, shape=[10.0]), "malformed shape [10.0]"),
    Hostile("bool shape", with_entry(NORM, shape=[True]), "malformed shape [True]"),
    Hostile("shape that is text", with_entry(NORM, shape="10"), "malformed shape '10'"),
    Hostile("shape of nine", with_entry(NORM, shape=[1] * 9), "malformed shape"),
    Hostile("shape beyond 64 bits", with_entry(NORM, shape=[2**40, 2**40]), "malformed shape"),
    Hostile("shape beyond 64 bits, and empty", with_entry(NORM, shape=[2**40, 2**40, 0]), "malformed shape"),
    Hostile("shape that wraps to the right size", with_entry(NORM, shape=[2**63 + 10]), "malformed shape"),
    Hostile("many sizes", with_entry(NORM, shape=[1] * 300_000), "malformed shape"),
    Hostile("wrong shape", with_entry(NORM, shape=[11]), "does not fill its 20 bytes"),
    Hostile("wrong dtype", with_entry(NORM, dtype="F32"), "does not fill its 20 bytes"),
    Hostile(
        "offsets backwards", with_entry(NORM, data_offsets=[308, 288]), "malformed data_offsets [308, 288]"
    ),
    Hostile("negative offset", with_entry(NORM, data_offsets=[-20, 0]), "malformed data_offsets"),
    Hostile("three offsets", with_entry(NORM, data_offsets=[0, 1, 2]), "malformed data_offsets"),
    Hostile("offsets that are text", with_entry(NORM, data_offsets=["288", "308"]), "malformed data_offsets"),
    Hostile(
        "offsets beyond the file",
        with_entry(NORM, data_offsets=[2**61, 2**61 + 20]),
        "leaves a hole before it",
    ),
    Hostile("overlap", with_entry(NORM, data_offsets=[272, 292]), "overlaps another"),
    Hostile("a hole", with_header(lambda h: h.pop("padding.1")), "leaves a hole before it"),
    Hostile("name with NUL", _named("a\0b"), "tensor name 'a\\x00b' is not"),
    Hostile("name of two lines", _named("a\nb"), "tensor name 'a\\nb' is not"),
    Hostile("name that turns the text around", _named("a\u202eb"), "'a\\u202eb' is not"),
    Hostile("no name", _named(""), "tensor name '' is not 1 to 512"),
    Hostile("very long name", _named("x" * 1_000_000), "is not 1 to 512 characters"),
]
