"""Format 2: stacks of experts are read as FORMAT.md describes them, and hostile ones are refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltastore.errors import ArtifactError, PeraxisError
from deltastore.format.artifact import Artifact
from deltastore.format.header import FREE_HEADER_BYTES
from deltastore.format.manifest import FORMAT_KEY, MAX_EXPERTS, Manifest
from deltastore.format.matrix import StackDelta
from deltastore.format.sizes import coded_names, one_bit_plan, tensor_bytes
from deltastore.format.validate import check_artifact, check_base, check_no_stacks
from tests.deltastore.helpers.hostile import (
    Change,
    Part,
    compose,
    with_entry,
    with_header,
    with_manifest,
    with_part,
    with_parts,
    with_spec,
    with_values,
)
from tests.helpers.tiny_artifact import tiny_manifest, write_tiny
from tests.helpers.tiny_stacks import SPECS, STACK, STACKS_BASE, TURNED, tiny_stack, write_stacks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("stacks") / "a.safetensors"
    write_stacks(path)
    return path.read_bytes()


def read_all(path: Path) -> None:
    with Artifact.open(path, "upload") as artifact:
        check_base(artifact, STACKS_BASE)
        check_artifact(artifact)
        for name in artifact.manifest.stacks:
            assert artifact.stack(name).dense().isfinite().all()


def test_a_stack_is_read_as_it_was_written(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(good)
    read_all(path)
    with Artifact.open(path) as artifact:
        assert artifact.header.metadata[FORMAT_KEY] == artifact.manifest.format == "2"
        for name, spec in SPECS.items():
            own, want = artifact.stack(name), tiny_stack(name)
            assert (own.shape, own.axis, own.transposed) == (tuple(spec.shape), spec.axis, spec.transposed)
            assert torch.equal(own.dense(), want.dense())
            assert torch.equal(own.dense(slice(1, 2)), want.dense()[1:2])


def test_a_stacks_parts_have_a_row_for_each_expert_and_stock_safetensors_reads_them(
    good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(good)
    found = {name: (value.dtype, tuple(value.shape)) for name, value in load_file(path).items()}
    assert {name: form for name, form in found.items() if not name.startswith("padding.")} == {
        f"{STACK}.signs": (torch.uint8, (3, 5, 2)),
        f"{STACK}.scale_out": (torch.float16, (3, 5)),
        f"{STACK}.scale_in": (torch.float16, (3, 13)),
        f"{STACK}.gain": (torch.float32, (3,)),
        # Stored as [experts, in, out]: a scale for each column.
        f"{TURNED}.signs": (torch.uint8, (3, 6, 2)),
        f"{TURNED}.scale_out": (torch.float16, (3, 10)),
        f"{TURNED}.gain": (torch.float32, (3,)),
    }


def test_an_expert_is_its_signs_times_its_own_scales(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(good)
    tensors = load_file(path)
    with Artifact.open(path) as artifact:
        for name, rows, columns in ((STACK, "scale_out", "scale_in"), (TURNED, None, "scale_out")):
            dense = artifact.stack(name).dense()
            for expert, row, column in ((0, 0, 0), (1, 3, 9), (2, 4, 8)):
                bit = tensors[f"{name}.signs"][expert, row, column // 8] >> column % 8 & 1
                want = (2.0 * float(bit) - 1) * float(tensors[f"{name}.gain"][expert])
                if rows:
                    want *= float(tensors[f"{name}.{rows}"][expert, row])
                want *= float(tensors[f"{name}.{columns}"][expert, column])
                assert float(dense[expert, row, column]) == pytest.approx(want, rel=1e-6)


def test_an_artifact_without_stacks_stays_in_format_1(tmp_path: Path) -> None:
    digest = write_tiny(tmp_path / "a")
    with Artifact.open(tmp_path / "a") as artifact:
        assert artifact.header.metadata[FORMAT_KEY] == artifact.manifest.format == "1"
        check_no_stacks(artifact.manifest, "upload")
        assert artifact.digest() == digest


def _claims(number: str) -> Change:
    return with_header(lambda header: header["__metadata__"].update({FORMAT_KEY: number}))


def _grown(raw: bytes) -> bytes:
    """Claim an exabyte of signs in a header whose other sizes agree with it."""

    def change(header: dict[str, Any]) -> None:
        entry = header[f"{STACK}.signs"]
        entry["shape"], entry["data_offsets"] = [3, 2**58, 2], [0, 3 * 2**59]

    return compose(with_header(change), with_spec(STACK, shape=[3, 2**58, 13]))(raw)


def _shorter(name: str, dtype: str, shape: list[int], num_bytes: int) -> Change:
    return with_part(name, dtype, shape, bytes(num_bytes))


def _emptied(parts: list[Part]) -> None:
    # Those of the stack and their padding are the first.
    first = next(number for number, part in enumerate(parts) if part.name.startswith(TURNED))
    del parts[:first]
    for name, dtype, shape in (
        ("signs", "U8", [0, 5, 2]),
        ("scale_out", "F16", [0, 5]),
        ("scale_in", "F16", [0, 13]),
        ("gain", "F32", [0]),
    ):
        parts.insert(0, Part(f"{STACK}.{name}", dtype, shape, b""))


HOSTILE: list[tuple[str, Change, str]] = [
    ("format 3", _claims("3"), "artifact format '3', and this version of Peraxis reads formats 1 and 2"),
    ("format 1 with stacks", _claims("1"), "it says format 1 and holds 2 stacks of experts"),
    ("format 02", _claims("02"), "artifact format '02'"),
    ("truncated in the data", lambda raw: raw[:-1], "truncated: its tensors need"),
    ("truncated in the header", lambda raw: raw[:1000], "truncated: its header needs"),
    ("truncated before the data", lambda raw: raw[:4096], "truncated: its tensors need"),
    ("fewer experts in the spec", with_spec(STACK, shape=[2, 5, 13]), "must be U8 [2, 5, 2]"),
    ("more experts in the spec", with_spec(STACK, shape=[4, 5, 13]), "must be U8 [4, 5, 2]"),
    ("other rows in the spec", with_spec(STACK, shape=[3, 6, 13]), "must be U8 [3, 6, 2]"),
    ("other columns in the spec", with_spec(STACK, shape=[3, 5, 12]), "must be F16 [3, 12]"),
    ("two dimensions", with_spec(STACK, shape=[15, 13]), "a stack needs an axis and three dimensions"),
    ("four dimensions", with_spec(STACK, shape=[1, 3, 5, 13]), "a stack needs an axis and three dimensions"),
    ("no axis", with_spec(STACK, axis=None), "a stack needs an axis and three dimensions"),
    ("two planes", with_spec(STACK, planes=2), "has no further planes"),
    ("a rank", with_spec(STACK, rank=1), "has no further planes"),
    ("added rows", with_spec(STACK, added_rows=1), "has no further planes"),
    ("against another", with_spec(STACK, against=TURNED), "nothing to be against"),
    ("a matrix", with_spec(STACK, codec="onebit"), "a onebit tensor needs an axis, two dimensions"),
    ("whole", with_spec(STACK, codec="whole"), "a whole tensor has no axis"),
    ("turned the other way", with_spec(TURNED, transposed=False), "must be F16 [3, 6]"),
    ("transposed that is text", with_spec(TURNED, transposed="yes"), "valid boolean"),
    (
        "no experts",
        compose(with_parts(_emptied), with_spec(STACK, shape=[0, 5, 13])),
        "the empty shape [0, 5, 13]",
    ),
    ("no rows", with_spec(STACK, shape=[3, 0, 13]), "the empty shape [3, 0, 13]"),
    (
        "more experts than allowed",
        with_spec(STACK, shape=[MAX_EXPERTS + 1, 5, 13]),
        "more than the 4096 allowed",
    ),
    ("experts beyond 64 bits", with_spec(STACK, shape=[2**62, 5, 13]), "less than 4611686018427387904"),
    ("negative experts", with_spec(STACK, shape=[-3, 5, 13]), "greater than or equal to 0"),
    ("experts that are true", with_spec(STACK, shape=[True, 5, 13]), "valid integer"),
    ("an exabyte of signs", _grown, "overlaps another"),
    (
        "a product beyond 64 bits",
        with_entry(f"{STACK}.signs", shape=[2**22, 2**30, 2**30]),
        "malformed shape",
    ),
    (
        "signs that do not fill their bytes",
        with_entry(f"{STACK}.signs", shape=[3, 5, 3]),
        "does not fill its 30",
    ),
    ("overlap", with_entry(f"{STACK}.gain", data_offsets=[0, 12]), "overlaps another"),
    ("a gain for two", _shorter(f"{STACK}.gain", "F32", [2], 8), "must be F32 [3]"),
    ("scales of a single matrix", _shorter(f"{STACK}.scale_out", "F16", [5], 10), "must be F16 [3, 5]"),
    ("flat signs", _shorter(f"{STACK}.signs", "U8", [15, 2], 30), "must be U8 [3, 5, 2]"),
    (
        "a gain that is no power of two",
        with_values(f"{STACK}.gain", [0.3], torch.float32, at=1),
        "gain 0.30000001192092896 of expert 1",
    ),
    ("a gain of zero", with_values(f"{STACK}.gain", [0.0], torch.float32, at=2), "of expert 2"),
    (
        "a gain that is NaN",
        with_values(f"{STACK}.gain", [float("nan")], torch.float32),
        "gain nan of expert 0",
    ),
    (
        "an infinite gain",
        with_values(f"{TURNED}.gain", [float("inf")], torch.float32),
        "gain inf of expert 0",
    ),
    ("a negative gain", with_values(f"{TURNED}.gain", [-2.0], torch.float32), "gain -2.0 of expert 0"),
    (
        "NaN in the scales of one expert",
        with_values(f"{STACK}.scale_in", [float("nan")], torch.float16, at=30),
        f"'{STACK}.scale_in' holds NaN or infinity",
    ),
    (
        "one expert beyond FP16",
        with_values(f"{TURNED}.gain", [2.0**20], torch.float32, at=2),
        f"the numbers of tensor '{TURNED}' reach",
    ),
    (
        "rows beyond FP16 that columns make small",
        compose(
            with_values(f"{STACK}.gain", [2.0**20], torch.float32, at=1),
            with_values(f"{STACK}.scale_in", [2.0**-20] * 13, torch.float16, at=13),
        ),
        f"the numbers of tensor '{STACK}' reach",
    ),
    (
        "a pad bit of the last expert",
        with_values(f"{STACK}.signs", [0xFF], torch.uint8, at=29),
        f"1 rows of tensor '{STACK}.signs' have pad bits set",
    ),
    (
        "a stack of another name",
        with_manifest(
            lambda manifest: manifest["tensors"].update({"x.experts.w": manifest["tensors"].pop(STACK)})
        ),
        "tensor 'x.experts.w.",
    ),
    (
        "a header of mebibytes",
        lambda raw: struct.pack("<Q", FREE_HEADER_BYTES + len(raw)) + raw[8:],
        "more than the",
    ),
]


@pytest.mark.parametrize(("change", "says"), [pytest.param(*rest, id=name) for name, *rest in HOSTILE])
def test_a_hostile_stack_is_refused_with_its_own_error(
    change: Callable[[bytes], bytes], says: str, good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(change(good))
    with pytest.raises(PeraxisError) as caught:
        read_all(path)
    assert type(caught.value) is ArtifactError
    assert says in str(caught.value)
    assert str(caught.value).startswith("upload: ")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("shape", [(2, 5, 13), (3, 13, 5), (3, 5), (15, 13), (3, 5, 13, 1)])
def test_a_stack_of_another_shape_than_the_bases_is_refused(
    shape: tuple[int, ...], good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(good)
    other = replace(STACKS_BASE, shapes={**STACKS_BASE.shapes, STACK: shape})
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match="is for the shape"):
        check_base(artifact, other)


def test_format_1_that_claims_format_2_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tiny(path)
    path.write_bytes(_claims("2")(path.read_bytes()))
    with pytest.raises(ArtifactError, match="it says format 2 and holds no stack of experts"):
        Artifact.open(path)


def test_a_stack_needs_experts_of_one_form() -> None:
    first = tiny_stack(STACK).experts[0]
    others = [(), (first, replace(first, scale_out=None)), (first, tiny_stack(TURNED).experts[0])]
    for experts in others:
        with pytest.raises(ValueError, match="one or more experts of one axis and shape"):
            StackDelta(experts)


def test_the_plan_of_a_stack_is_what_its_artifact_takes(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(good)
    shapes = {STACK: (3, 5, 13)}
    planned = one_bit_plan(shapes, [STACK])
    with Artifact.open(path) as artifact:
        sizes = tensor_bytes(artifact, STACK)
    assert (planned.signs_bytes, planned.scales_bytes) == (sizes["signs"], sizes["scales"])
    assert planned.full_bytes == 2 * 3 * 5 * 13
    # Without its name it is stored whole.
    assert one_bit_plan(shapes).whole_bytes == planned.full_bytes


def test_matrices_beside_a_stack_with_a_row_for_each_expert_stay_whole() -> None:
    layer = "model.layers.0."
    shapes = {
        f"{layer}mlp.experts.down_proj": (8, 64, 32),
        f"{layer}mlp.experts.down_proj_bias": (8, 64),
        f"{layer}mlp.router.weight": (8, 64),
        f"{layer}mlp.shared_expert.up_proj.weight": (32, 64),
        f"{layer}self_attn.q_proj.weight": (8, 64),
        "model.layers.1.mlp.gate.weight": (8, 64),
    }
    assert coded_names(shapes, [f"{layer}mlp.experts.down_proj"]) == {
        f"{layer}mlp.experts.down_proj",
        f"{layer}mlp.shared_expert.up_proj.weight",
        f"{layer}self_attn.q_proj.weight",
        "model.layers.1.mlp.gate.weight",
    }


def test_a_manifest_with_stacks_is_parsed_as_it_was_written() -> None:
    manifest = tiny_manifest(0).model_copy(update={"tensors": SPECS})
    metadata = manifest.to_metadata()
    assert Manifest.from_metadata(metadata, "x") == Manifest.from_verified_metadata(metadata, "x")
    assert json.loads(metadata["peraxis.manifest"])["tensors"][TURNED]["transposed"] is True
