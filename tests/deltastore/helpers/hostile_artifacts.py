"""Hostile artifacts whose header and manifest can be read: invalid layouts, numbers and bases."""

from __future__ import annotations

import torch

from deltastore.errors import BaseMismatch
from tests.deltastore.helpers.hostile import (
    Change,
    Hostile,
    Part,
    assemble,
    compose,
    renamed,
    take_apart,
    with_entry,
    with_manifest,
    with_part,
    with_parts,
    with_spec,
    with_values,
)
from tests.helpers.tiny_artifact import BOTH, EMBEDDING, IN, NORM, SCALAR, UNCHANGED

HEAD = "lm_head.weight"
LAYOUTS = [
    Hostile(
        "data elsewhere",
        lambda raw: assemble(*take_apart(raw), alignment=16),
        "which is not a multiple of 4096",
    ),
    Hostile(
        "file named twice",
        with_manifest(lambda m: m["files"].append(m["files"][0])),
        "asks for tensor 'file.chat_template.jinja' twice",
    ),
    Hostile(
        "file that is not there",
        with_manifest(lambda m: m["files"].append("vocab.txt")),
        "'file.vocab.txt' is in its manifest and not",
    ),
    Hostile(
        "tensor that is not there",
        with_manifest(lambda m: m["tensors"].update(a={"codec": "whole", "shape": [1]})),
        "'a' is in its manifest and not in the file",
    ),
    Hostile(
        "tensor that is not in the manifest",
        with_manifest(lambda m: m["tensors"].pop(NORM)),
        "'model.norm.weight' is not in its manifest",
    ),
    Hostile(
        "file that is not in the manifest",
        with_manifest(lambda m: m["files"].pop()),
        "'file.generation_config.json' is not in its manifest",
    ),
    Hostile(
        "one tensor for two",
        with_manifest(lambda m: m["tensors"].update({f"{BOTH}.gain": {"codec": "whole", "shape": [1]}})),
        "asks for tensor 'model.layers.0.self_attn.q_proj.weight.gain' twice",
    ),
    Hostile(
        "device_bytes too small",
        with_manifest(lambda m: m.update(device_bytes=16)),
        "device_bytes is 16 and its layout gives 320",
    ),
    Hostile(
        "device_bytes too large",
        with_manifest(lambda m: m.update(device_bytes=2**61)),
        "its layout gives 320",
    ),
    Hostile(
        "files before tensors",
        with_parts(lambda parts: parts.__setitem__(slice(0, 0), [parts.pop(-2), parts.pop(-1)])),
        "lies after the variant's files",
    ),
    Hostile(
        "not aligned",
        with_parts(lambda parts: parts.insert(0, Part("padding.999", "U8", [8], bytes(8)))),
        "is not aligned to 16 bytes",
    ),
    Hostile(
        "long padding",
        with_parts(lambda parts: parts.append(Part("padding.999", "U8", [16], bytes(16)))),
        "'padding.999' is not a padding of 1 to 15 U8 bytes",
    ),
    Hostile(
        "empty padding",
        with_parts(lambda parts: parts.append(Part("padding.999", "U8", [0], b""))),
        "'padding.999' is not a padding of 1 to 15 U8 bytes",
    ),
    Hostile(
        "padding by another name",
        with_parts(lambda parts: parts.append(Part("padding.x", "U8", [3], bytes(3)))),
        "'padding.x' is not in its manifest",
    ),
    Hostile(
        "file of numbers",
        with_part("file.generation_config.json", "F16", [8], bytes(16)),
        "must be a row of U8 bytes",
    ),
    Hostile("no rows", with_spec(EMBEDDING, added_rows=8), "has the empty shape"),
    Hostile("no columns", with_spec(BOTH, shape=[5, 0]), "has the empty shape"),
    Hostile("whole tensor without values", with_spec(NORM, shape=[0]), "has the empty shape"),
    Hostile(
        "signs of floats",
        with_part(f"{IN}.signs", "F16", [3, 2], bytes(12)),
        "is F16 [3, 2] and must be U8 [3, 2]",
    ),
    Hostile(
        "signs too narrow",
        with_part(f"{BOTH}.signs", "U8", [5, 1], bytes(5)),
        "is U8 [5, 1] and must be U8 [5, 2]",
    ),
    Hostile(
        "scales of float32",
        with_part(f"{BOTH}.scale_out", "F32", [5], bytes(20)),
        "is F32 [5] and must be F16 [5]",
    ),
    Hostile(
        "scales too short",
        with_part(f"{BOTH}.scale_in", "F16", [12], bytes(24)),
        "is F16 [12] and must be F16 [13]",
    ),
    Hostile(
        "two scalars",
        with_part(f"{SCALAR}.scale_out", "F16", [2], bytes(4)),
        "is F16 [2] and must be F16 [1]",
    ),
    Hostile(
        "gain of float16", with_part(f"{BOTH}.gain", "F16", [1], bytes(2)), "is F16 [1] and must be F32 [1]"
    ),
    Hostile("two gains", with_part(f"{BOTH}.gain", "F32", [2], bytes(8)), "is F32 [2] and must be F32 [1]"),
    Hostile(
        "added rows too narrow",
        with_part(f"{EMBEDDING}.added", "F16", [2, 9], bytes(36)),
        "and must be F16 or BF16 or F32 [2, 10]",
    ),
    Hostile(
        "whole tensor of integers",
        with_part(NORM, "I64", [10], bytes(80)),
        "is I64 [10] and must be F16 or BF16 or F32 [10]",
    ),
    Hostile(
        "shape that the file does not have",
        with_spec(NORM, shape=[2, 5]),
        "is BF16 [10] and must be F16 or BF16 or F32 [2, 5]",
    ),
    Hostile(
        "enormous shape",
        with_spec(BOTH, shape=[2**61, 2**61]),
        "and must be U8 [2305843009213693952, 288230376151711744]",
    ),
]

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
NUMBERS = [
    *(
        Hostile(f"gain {gain}", with_values(f"{SCALAR}.gain", [gain], F32), "is not a power of two")
        for gain in (0.0, -0.0, -0.5, 3.0, INF, -INF, NAN, 2.0**-127, 2.0**-149, 1.0000001)
    ),
    Hostile(
        "NaN in scale_out",
        with_values(f"{BOTH}.scale_out", [NAN], F16, 4),
        "q_proj.weight.scale_out' holds NaN",
    ),
    Hostile(
        "NaN in scale_in", with_values(f"{IN}.scale_in", [NAN], F16, 15), "v_proj.weight.scale_in' holds NaN"
    ),
    Hostile(
        "infinity in scale_in",
        with_values(f"{BOTH}.scale_in", [-INF], F16),
        "scale_in' holds NaN or infinity",
    ),
    Hostile(
        "infinity in a scalar",
        with_values(f"{SCALAR}.scale_out", [INF], F16),
        "scale_out' holds NaN or infinity",
    ),
    Hostile(
        "scale that overflows", with_values(f"{SCALAR}.gain", [2.0**127], F32), "reach 1.91e+38, beyond 65504"
    ),
    Hostile(
        "row factor that overflows before it is multiplied by zeros",
        compose(
            with_values(f"{BOTH}.gain", [2.0**127], F32), with_values(f"{BOTH}.scale_in", [0.0] * 13, F16)
        ),
        "q_proj.weight' reach 2.55e+38, beyond 65504",
    ),
    Hostile(
        "row factor beyond the range that small columns bring back",
        compose(
            with_values(f"{BOTH}.gain", [2.0**16], F32), with_values(f"{BOTH}.scale_in", [2.0**-20] * 13, F16)
        ),
        "q_proj.weight' reach 9.83e+04, beyond 65504",
    ),
    Hostile("product that overflows", with_values(f"{BOTH}.gain", [2.0**15], F32), "q_proj.weight' reach"),
    Hostile(
        "NaN in a whole tensor",
        with_values(NORM, [NAN], BF16, 9),
        "'model.norm.weight' holds NaN or infinity",
    ),
    Hostile(
        "infinity in a whole tensor",
        with_values(NORM, [INF], BF16),
        "'model.norm.weight' holds NaN or infinity",
    ),
    Hostile(
        "absurd norm",
        with_values(NORM, [-3e38], BF16, 9),
        "the numbers of tensor 'model.norm.weight' reach 3e+38, beyond 65504",
    ),
    Hostile(
        "norm just beyond the range",
        with_values(NORM, [65536.0], BF16),
        "the numbers of tensor 'model.norm.weight' reach 6.55e+04, beyond 65504",
    ),
    Hostile(
        "NaN in added rows", with_values(f"{EMBEDDING}.added", [NAN], F16, 19), "added' holds NaN or infinity"
    ),
    Hostile(
        "pad bit set",
        with_values(f"{BOTH}.signs", [0x29], torch.uint8, 9),
        "1 rows of tensor 'model.layers.0.self_attn.q_proj.weight.signs' have pad bits set",
    ),
]


def _row(parts: list[Part]) -> None:
    """Add a row to a matrix that is not an embedding."""
    index = next(index for index, part in enumerate(parts) if part.name == f"{IN}.signs")
    parts.insert(index, Part(f"{IN}.added", "F16", [1, 16], bytes(32)))


def with_head(rows: int, tied: bool) -> Change:
    """Give the variant a separate output head, while the base's is tied."""
    data = bytes(-(-rows * 20 // 16) * 16)
    head = [Part(HEAD, "F16", [rows, 10], data[: rows * 20])]
    if len(data) > rows * 20:
        head.append(Part("padding.999", "U8", [len(data) - rows * 20], data[rows * 20 :]))
    spec = {"codec": "whole", "shape": [rows, 10]}
    return compose(
        with_parts(lambda parts: parts.__setitem__(slice(0, 0), head)),
        with_manifest(lambda m: (m.update(tied=tied), m["tensors"].update({HEAD: spec}))),
    )


BASES = [
    Hostile(
        "another base",
        with_manifest(lambda m: m.update(base_fingerprint="00" * 32, base_id="b" * 500)),
        "made from base 'bbbb",
        BaseMismatch,
    ),
    Hostile(
        "another architecture",
        with_manifest(lambda m: m["config"].update(rms_norm_eps=1e-5)),
        "differs from the base's in 'rms_norm_eps',",
        BaseMismatch,
    ),
    Hostile(
        "tensor that the base lacks",
        renamed(NORM, "model.norm.bias"),
        "tensor 'model.norm.bias' is not in the base",
    ),
    Hostile(
        "path as a tensor", renamed(NORM, "../../etc/passwd"), "tensor '../../etc/passwd' is not in the base"
    ),
    Hostile(
        "longer norm",
        compose(with_part(NORM, "BF16", [11], bytes(22)), with_spec(NORM, shape=[11])),
        "is for the shape [11] and the base's is [10]",
    ),
    Hostile(
        "norm of two dimensions",
        compose(with_entry(NORM, shape=[2, 5]), with_spec(NORM, shape=[2, 5])),
        "is for the shape [2, 5] and the base's is [10]",
    ),
    Hostile(
        "norm without dimensions",
        compose(with_part(NORM, "F32", [], bytes(4)), with_spec(NORM, shape=[])),
        "is for the shape [] and the base's is [10]",
    ),
    Hostile(
        "another matrix's name",
        renamed(SCALAR, UNCHANGED),
        "is for the shape [3, 8] and the base's is [9, 10]",
    ),
    Hostile(
        "embedding that is one bit and shorter",
        renamed(EMBEDDING, UNCHANGED),
        "is for the shape [6, 10] and the base's is [9, 10]",
    ),
    Hostile(
        "added rows on a projection",
        compose(with_parts(_row), with_spec(IN, shape=[4, 16], added_rows=1)),
        "adds rows, which only embedding and output head may",
    ),
    Hostile(
        "against nonsense",
        with_spec(BOTH, against="x" * 500),
        "must be against 'model.layers.0.self_attn.q_proj.weight'",
    ),
    Hostile(
        "against another tensor",
        with_spec(SCALAR, against=IN),
        "must be against 'model.layers.0.self_attn.k_proj.weight'",
    ),
    Hostile("tied, with a head", with_head(8, tied=True), "'lm_head.weight' is a head of its own"),
    Hostile(
        "head shorter than the base's embedding",
        with_head(5, tied=False),
        "is for the shape [5, 10] and the base's is [6, 10]",
    ),
    Hostile(
        "head shorter than the embedding",
        with_head(6, tied=False),
        "its embedding adds 2 rows and its output head 0",
    ),
    Hostile(
        "untied, without a head",
        with_manifest(lambda m: m.update(tied=False)),
        "its embedding adds 2 rows and its output head 0",
    ),
]
