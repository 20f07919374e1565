"""Format 1, byte by byte. A change of any of these bytes needs another format number."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import deltastore
from deltastore.format.artifact import Artifact
from deltastore.format.files import FILES as VARIANT_FILES
from deltastore.format.header import ALIGNMENT, MAX_DIGITS, MAX_HEADER_BYTES, MAX_JSON_VALUES, MAX_NAME_CHARS
from deltastore.format.layout import MAX_FILE_BYTES
from deltastore.format.manifest import MAX_FACTS_BYTES, Manifest, TensorSpec, part_names
from deltastore.format.validate import check_artifact, check_base
from deltastore.registry.uploads import CHUNK_BYTES
from tests.helpers.tiny_artifact import (
    BASE,
    BOTH,
    EMBEDDING,
    FILES,
    IN,
    NORM,
    SCALAR,
    SPECS,
    added_rows,
    norm,
    tiny_onebit,
    write_tiny,
)

DIGEST = "62de87fd862b3aae4a038f3230cec50fbf3f04b73e542ca075985565dfbd267f"
ORDER = [
    *(f"{EMBEDDING}.{part}" for part in ("signs", "scale_out", "gain", "added")),
    *(f"{BOTH}.{part}" for part in ("signs", "scale_out", "scale_in", "gain")),
    *(f"{SCALAR}.{part}" for part in ("signs", "scale_out", "gain")),
    *(f"{IN}.{part}" for part in ("signs", "scale_in", "gain")),
    NORM,
    "file.chat_template.jinja",
    "file.generation_config.json",
]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    write_tiny(path)
    return path


def test_the_file_has_its_known_digest(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    assert write_tiny(path) == DIGEST
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGEST
    with Artifact.open(path) as artifact:
        assert artifact.digest() == DIGEST


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (0, "f80f000000000000"),  # the header's length: 4088
        (8, b'{"__metadata__":{"peraxis.format":"1","peraxis.manifest":"{\\"base_id\\":\\"tiny\\"'.hex()),
        (4088, "2020202020202020"),  # spaces up to the data
        (4096, "290129012901290129012901"),  # embedding: signs, rows of 10 in 2 bytes
        (4096 + 12, "00000000"),  # padding up to 16
        (4096 + 16, "003c803c00bd803d003e80be"),  # scale_out: 1, 1.125, -1.25, ...
        (4096 + 32, "00008038"),  # gain 2^-14
        (4096 + 48, "0024802400a5"),  # added rows: 1/64, 1.125/64, -1.25/64
        (4096 + 96, "2905a5149412520a4a09"),  # both: signs, rows of 13 in 2 bytes
        (4096 + 176, "29a594"),  # scalar: signs, rows of 8 in 1 byte
        (4096 + 192, "803c"),  # its one scale
        (4096 + 240, "003c803c00bd"),  # in: scale_in
        (4096 + 288, "883f893f6c3f"),  # norm in bfloat16
        (4096 + 320, b"{{ messages }}\0\0".hex()),  # device_bytes is 320: here the files begin
        (4096 + 336, b'{"top_k": 5}\n\0\0\0'.hex()),
    ],
)
def test_known_bytes_lie_at_known_offsets(tiny: Path, offset: int, expected: str) -> None:
    raw = tiny.read_bytes()
    assert raw[offset : offset + len(expected) // 2].hex() == expected


def test_the_file_ends_where_its_last_tensor_ends(tiny: Path) -> None:
    assert tiny.stat().st_size == 4096 + 352


def test_tensors_keep_the_order_in_which_they_were_added(tiny: Path) -> None:
    raw = tiny.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    names = [name for name in json.loads(raw[8 : 8 + length]) if not name.startswith(("padding.", "__"))]
    with Artifact.open(tiny) as artifact:
        by_offset = [name for name in artifact.header.tensors if not name.startswith("padding.")]
    assert names == by_offset == ORDER


def test_every_tensor_begins_at_a_multiple_of_16_bytes(tiny: Path) -> None:
    with Artifact.open(tiny) as artifact:
        assert artifact.header.data_start % ALIGNMENT == 0
        starts = {name: artifact.header.tensors[name].start % 16 for name in ORDER}
    assert starts == dict.fromkeys(ORDER, 0)


def test_device_bytes_end_before_the_first_file(tiny: Path) -> None:
    with Artifact.open(tiny) as artifact:
        assert artifact.manifest.device_bytes == artifact.header.tensors[ORDER[-2]].start == 320


def test_the_stock_library_reads_what_was_written(tiny: Path) -> None:
    tensors = load_file(tiny)
    both = tiny_onebit(BOTH)
    assert set(ORDER) <= tensors.keys()
    assert torch.equal(tensors[f"{BOTH}.signs"], both.signs)
    assert torch.equal(tensors[f"{BOTH}.gain"], torch.tensor([2.0**-14]))
    assert torch.equal(tensors[NORM], norm())
    assert bytes(tensors["file.chat_template.jinja"].numpy()) == FILES["chat_template.jinja"]
    with safe_open(tiny, "pt") as stock:
        assert stock.metadata()["peraxis.format"] == "1"


def test_what_was_written_is_read_back(tiny: Path) -> None:
    with Artifact.open(tiny) as artifact:
        check_artifact(artifact)
        check_base(artifact, BASE)
        for name, spec in SPECS.items():
            if spec.codec == "onebit":
                assert torch.equal(artifact.onebit(name).dense(), tiny_onebit(name).dense())
                assert artifact.onebit(name).axis == spec.axis
        added = artifact.added(EMBEDDING)
        assert added is not None
        assert torch.equal(added, added_rows())
        assert artifact.added(BOTH) is None
        assert torch.equal(artifact.whole(NORM), norm())
        assert {name: artifact.file(name) for name in artifact.manifest.files} == FILES
        assert artifact.manifest.tensors == SPECS
        assert artifact.manifest.fidelity == {"kl": 0.25}


def test_the_same_delta_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert write_tiny(tmp_path / "again.safetensors") == DIGEST
    assert (tmp_path / "again.safetensors").read_bytes() == tiny.read_bytes()


def test_the_description_names_every_field_and_file_and_limit() -> None:
    text = (Path(deltastore.__file__).parent / "format" / "FORMAT.md").read_text()
    fields = [*Manifest.model_fields, *TensorSpec.model_fields, *VARIANT_FILES]
    spec = TensorSpec(codec="onebit", shape=[9, 8], axis="both", planes=2, rank=1, added_rows=1)
    parts = part_names("NAME", spec).all()
    assert not [name for name in [*fields, *parts] if f"`{name}`" not in text]
    limits = [MAX_JSON_VALUES, MAX_NAME_CHARS, CHUNK_BYTES, f"{MAX_DIGITS} characters"]
    limits += [f"{MAX_HEADER_BYTES >> 20} MiB", f"{MAX_FILE_BYTES >> 20} MiB", f"{MAX_FACTS_BYTES >> 10} KiB"]
    assert not [limit for limit in limits if str(limit) not in text]
