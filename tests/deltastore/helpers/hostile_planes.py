"""Hostile changes of an artifact whose matrices have several planes and low-rank residuals."""

from __future__ import annotations

import torch

from tests.deltastore.helpers.hostile import (
    Change,
    Hostile,
    Part,
    compose,
    with_manifest,
    with_part,
    with_parts,
    with_spec,
    with_values,
)
from tests.helpers.tiny_artifact import BOTH, IN, NORM, SCALAR

F16, F32 = torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")


def without(name: str) -> Change:
    """Leave out a tensor and its padding."""

    def changed(parts: list[Part]) -> None:
        index = next(index for index, part in enumerate(parts) if part.name == name)
        del parts[index : index + (2 if parts[index + 1].name.startswith("padding.") else 1)]

    return with_parts(changed)


PLANES = [
    Hostile("no plane", with_spec(BOTH, planes=0), "planes: Input should be greater than or equal to 1"),
    Hostile("five planes", with_spec(BOTH, planes=5), "planes: Input should be less than or equal to 4"),
    Hostile("minus one plane", with_spec(BOTH, planes=-1), "planes: Input should be greater"),
    Hostile("bool planes", with_spec(BOTH, planes=True), "planes: Input should be a valid integer"),
    Hostile("float planes", with_spec(BOTH, planes=2.0), "planes: Input should be a valid integer"),
    Hostile(
        "a plane that is not in the manifest",
        with_spec(BOTH, planes=1),
        "plane1.signs' is not in its manifest",
    ),
    Hostile(
        "a plane that is not there", with_spec(BOTH, planes=3), "plane2.gain' is in its manifest and not in"
    ),
    Hostile(
        "a plane without a scale",
        without(f"{BOTH}.plane1.scale_in"),
        "q_proj.weight.plane1.scale_in' is in its manifest and not in the file",
    ),
    Hostile(
        "a plane of another axis",
        compose(without(f"{IN}.plane3.scale_in"), with_spec(IN, planes=4)),
        "v_proj.weight.plane3.scale_in' is in its manifest and not in the file",
    ),
    Hostile(
        "a plane that is narrower",
        with_part(f"{BOTH}.plane1.signs", "U8", [5, 1], bytes(5)),
        "plane1.signs' is U8 [5, 1] and must be U8 [5, 2]",
    ),
    Hostile(
        "one tensor for a plane and for itself",
        with_manifest(
            lambda m: m["tensors"].update({f"{BOTH}.plane1.gain": {"codec": "whole", "shape": [1]}})
        ),
        "asks for tensor 'model.layers.0.self_attn.q_proj.weight.plane1.gain' twice",
    ),
    Hostile("whole with planes", with_spec(NORM, planes=2), "a whole tensor has no axis, planes, rank"),
    Hostile(
        "gain of the last plane",
        with_values(f"{IN}.plane3.gain", [3.0], F32),
        "plane3.gain' is not a power of two",
    ),
    Hostile(
        "NaN in a later plane",
        with_values(f"{BOTH}.plane1.scale_out", [NAN], F16, 4),
        "plane1.scale_out' holds NaN or infinity",
    ),
    Hostile(
        "pad bit set in a later plane",
        with_values(f"{BOTH}.plane1.signs", [0x29], torch.uint8, 9),
        "1 rows of tensor 'model.layers.0.self_attn.q_proj.weight.plane1.signs' have pad bits set",
    ),
    Hostile(
        "planes that overflow together",
        compose(
            with_values(f"{BOTH}.gain", [2.0**14], F32), with_values(f"{BOTH}.plane1.gain", [2.0**14], F32)
        ),
        "q_proj.weight' reach 1.23e+05, beyond 65504",
    ),
]

RESIDUALS = [
    Hostile(
        "rank above the matrix", with_spec(BOTH, rank=6), "a residual of rank 6 is larger than its matrix"
    ),
    Hostile("enormous rank", with_spec(BOTH, rank=2**61), "a residual of rank 2305843009213693952 is larger"),
    Hostile("negative rank", with_spec(BOTH, rank=-1), "rank: Input should be greater than or equal to 0"),
    Hostile("bool rank", with_spec(SCALAR, rank=True), "rank: Input should be a valid integer"),
    Hostile("another rank", with_spec(BOTH, rank=2), "left' is F16 [5, 3] and must be F16 [5, 2]"),
    Hostile(
        "a residual that is not in the manifest", with_spec(BOTH, rank=0), "left' is not in its manifest"
    ),
    Hostile(
        "a residual that is not there", with_spec(IN, rank=1), "left' is in its manifest and not in the file"
    ),
    Hostile(
        "left alone", without(f"{BOTH}.right"), "q_proj.weight.right' is in its manifest and not in the file"
    ),
    Hostile("whole with a rank", with_spec(NORM, rank=1), "a whole tensor has no axis, planes, rank"),
    Hostile(
        "left of float32",
        with_part(f"{BOTH}.left", "F32", [5, 3], bytes(60)),
        "left' is F32 [5, 3] and must be F16 [5, 3]",
    ),
    Hostile(
        "right the other way round",
        with_part(f"{BOTH}.right", "F16", [13, 3], bytes(78)),
        "right' is F16 [13, 3] and must be F16 [3, 13]",
    ),
    Hostile("NaN in left", with_values(f"{BOTH}.left", [NAN], F16, 14), "left' holds NaN or infinity"),
    Hostile("infinity in right", with_values(f"{SCALAR}.right", [-INF], F16), "right' holds NaN or infinity"),
    Hostile(
        "a residual that overflows",
        compose(
            with_values(f"{BOTH}.left", [-4096.0], F16, 4), with_values(f"{BOTH}.right", [32.0], F16, 13)
        ),
        "q_proj.weight' reach 1.31e+05, beyond 65504",
    ),
]
