"""Several planes and a residual in a file: its bytes, reading it back, and a reader written from FORMAT.md alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.matrix import MatrixDelta, largest_of_plane, largest_of_residual
from deltastore.format.validate import check_artifact, check_base
from tests.helpers.tiny_artifact import (
    BASE,
    BOTH,
    EMBEDDING,
    IN,
    NORM,
    SCALAR,
    added_rows,
    tiny_onebit,
    write_tiny,
)
from tests.helpers.tiny_planes import SPECS, tiny_matrix, write_planes

DIGEST = "11027d5947517bf6a5cbc51e59c2f51e17256b13339393e8a8b170f92c9984e2"
CODED = [name for name, spec in SPECS.items() if spec.codec == "onebit"]
ORDER = [
    *(f"{EMBEDDING}.{part}" for part in ("signs", "scale_out", "gain")),
    *(f"{EMBEDDING}.plane1.{part}" for part in ("signs", "scale_out", "gain")),
    *(f"{EMBEDDING}.{part}" for part in ("left", "right", "added")),
    *(f"{BOTH}.{part}" for part in ("signs", "scale_out", "scale_in", "gain")),
    *(f"{BOTH}.plane1.{part}" for part in ("signs", "scale_out", "scale_in", "gain")),
    *(f"{BOTH}.{part}" for part in ("left", "right")),
    *(f"{SCALAR}.{part}" for part in ("signs", "scale_out", "gain", "left", "right")),
    *(f"{IN}.{part}" for part in ("signs", "scale_in", "gain")),
    *(f"{IN}.plane{number}.{part}" for number in (1, 2, 3) for part in ("signs", "scale_in", "gain")),
    NORM,
]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    write_planes(path)
    return path


def test_the_file_has_its_known_digest(tmp_path: Path) -> None:
    assert write_planes(tmp_path / "tiny.safetensors") == DIGEST


@pytest.mark.parametrize(
    ("name", "offset", "expected"),
    [
        (f"{EMBEDDING}.signs", 0, "290129012901"),  # rows of 10 in 2 bytes
        (f"{EMBEDDING}.plane1.signs", 48, "a500a500a500"),
        (f"{EMBEDDING}.plane1.gain", 80, "00008037"),  # 2^-16
        (f"{EMBEDDING}.left", 96, "001c801c009d"),  # 1/256, 1.125/256, -1.25/256
        (f"{EMBEDDING}.added", 144, "0024802400a5"),
        (f"{BOTH}.plane1.signs", 272, "a514"),  # a row of 13 in 2 bytes
        (f"{BOTH}.plane1.scale_out", 288, "003c803c00bd"),
        (f"{BOTH}.plane1.scale_in", 304, "003c803c00bd"),
        (f"{BOTH}.plane1.gain", 336, "00008037"),
        (f"{BOTH}.left", 352, "001c801c009d"),
        (f"{BOTH}.right", 384, "001880180099"),  # 1/512, 1.125/512, -1.25/512
    ],
)
def test_known_bytes_lie_at_known_offsets(tiny: Path, name: str, offset: int, expected: str) -> None:
    with Artifact.open(tiny) as artifact:
        assert artifact.header.tensors[name].start == offset
        start = artifact.header.data_start + offset
    assert tiny.read_bytes()[start : start + len(expected) // 2].hex() == expected


def test_planes_come_in_their_order_and_the_residual_behind_them(tiny: Path) -> None:
    with Artifact.open(tiny) as artifact:
        entries = [
            entry for entry in artifact.header.tensors.values() if not entry.name.startswith("padding.")
        ]
    assert [entry.name for entry in entries] == ORDER
    assert not any(entry.start % 16 for entry in entries)


def test_planes_and_rank_are_in_the_manifest_only_where_they_are_not_one_plane_alone(tiny: Path) -> None:
    (length,) = struct.unpack("<Q", tiny.read_bytes()[:8])
    header = json.loads(tiny.read_bytes()[8 : 8 + length])
    specs = json.loads(header["__metadata__"]["peraxis.manifest"])["tensors"]
    assert (specs[BOTH]["planes"], specs[BOTH]["rank"]) == (2, 3)
    assert "planes" not in specs[SCALAR]
    assert "rank" not in specs[IN]


def test_the_stock_library_reads_planes_and_residuals(tiny: Path) -> None:
    tensors, both = load_file(tiny), tiny_matrix(BOTH)
    assert both.left is not None
    assert both.right is not None
    assert torch.equal(tensors[f"{BOTH}.plane1.signs"], both.planes[1].signs)
    assert torch.equal(tensors[f"{BOTH}.left"], both.left)
    assert torch.equal(tensors[f"{BOTH}.right"], both.right)


def test_what_was_written_is_read_back(tiny: Path) -> None:
    with Artifact.open(tiny) as artifact:
        check_artifact(artifact)
        check_base(artifact, BASE)
        for name in CODED:
            got, spec = artifact.onebit(name), SPECS[name]
            assert torch.equal(got.dense(), tiny_matrix(name).dense())
            assert (got.axis, got.num_planes, got.rank) == (spec.axis, spec.planes, spec.rank)
            assert (got.out_features, got.in_features) == (spec.base_rows, spec.shape[1])
        added = artifact.added(EMBEDDING)
        assert added is not None
        assert torch.equal(added, added_rows())
        assert artifact.manifest.tensors == SPECS


def delta_by_the_description(path: Path, name: str) -> npt.NDArray[np.float32]:
    """Read an artifact as FORMAT.md describes it, with none of the project's code."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    spec = json.loads(header["__metadata__"]["peraxis.manifest"])["tensors"][name]
    rows, width = spec["shape"][0] - spec.get("added_rows", 0), spec["shape"][1]

    def part(tensor: str, dtype: str) -> npt.NDArray[np.float32]:
        begin, end = header[tensor]["data_offsets"]
        return np.frombuffer(data[begin:end], dtype).astype(np.float32)

    def plane(prefix: str) -> npt.NDArray[np.float32]:
        signs = part(f"{prefix}.signs", "u1").astype(np.int64).reshape(rows, -1)
        delta = np.array(
            [[1 if row[j // 8] >> (j % 8) & 1 else -1 for j in range(width)] for row in signs], np.float32
        )
        factor = np.broadcast_to(part(f"{prefix}.gain", "<f4"), rows)
        if spec["axis"] != "in":
            factor = part(f"{prefix}.scale_out", "<f2") * factor
        delta = delta * factor[:, None]
        return delta * part(f"{prefix}.scale_in", "<f2") if spec["axis"] in ("in", "both") else delta

    delta = plane(name)
    for number in range(1, spec.get("planes", 1)):
        delta = delta + plane(f"{name}.plane{number}")
    for rank in range(spec.get("rank", 0)):
        left = part(f"{name}.left", "<f2").reshape(rows, -1)[:, rank]
        delta = delta + left[:, None] * part(f"{name}.right", "<f2").reshape(-1, width)[rank]
    return delta


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(
    ("write", "dense"),
    [
        (write_tiny, lambda name: tiny_onebit(name).dense()),
        (write_planes, lambda name: tiny_matrix(name).dense()),
    ],
    ids=["one plane", "planes"],
)
def test_a_reader_made_from_the_description_alone_agrees(
    name: str, write: Callable[[Path], str], dense: Callable[[str], torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "a")
    assert np.array_equal(delta_by_the_description(tmp_path / "a", name), dense(name).numpy())


@pytest.mark.parametrize("name", CODED)
def test_some_rows_are_as_they_are_among_all(name: str) -> None:
    delta = tiny_matrix(name)
    assert torch.equal(delta.dense(slice(1, 3)), delta.dense()[1:3])


@pytest.mark.parametrize("name", CODED)
def test_no_number_is_beyond_what_bounds_it(name: str) -> None:
    delta = tiny_matrix(name)
    bound = 0.0 if delta.left is None or delta.right is None else largest_of_residual(delta.left, delta.right)
    for plane in delta.planes:
        scales = [scale for scale in (plane.scale_out, plane.scale_in) if scale is not None]
        assert float(plane.dense().abs().max()) == largest_of_plane(plane.gain, scales)
        bound += largest_of_plane(plane.gain, scales)
    assert 0.3 * bound < float(delta.dense().abs().max()) <= bound


def test_more_planes_than_a_reader_takes_are_not_written(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer, pytest.raises(ValidationError, match="planes"):
        writer.add_onebit(BOTH, MatrixDelta((tiny_onebit(BOTH),) * 5))
