"""One artifact of fixed numbers that has every codec, every axis, added rows and files; and the base that it fits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from deltastore.base import Base
from deltastore.format.artifact import ArtifactWriter
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs

EMBEDDING = "model.embed_tokens.weight"
BOTH = "model.layers.0.self_attn.q_proj.weight"
SCALAR = "model.layers.0.self_attn.k_proj.weight"
IN = "model.layers.0.self_attn.v_proj.weight"
NORM = "model.norm.weight"
UNCHANGED = "model.layers.0.mlp.up_proj.weight"
FILES = {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"top_k": 5}\n'}

BASE = Base(
    id="tiny",
    fingerprint="5f" * 32,
    shapes={EMBEDDING: (6, 10), BOTH: (5, 13), SCALAR: (3, 8), IN: (3, 16), NORM: (10,), UNCHANGED: (9, 10)},
    config={"model_type": "llama", "rms_norm_eps": 1e-6},
    embedding=EMBEDDING,
    head=None,
)
SPECS = {
    EMBEDDING: TensorSpec(
        codec="onebit", shape=[8, 10], axis="out", added_rows=2, num_zeros=4, zeros="positive"
    ),
    BOTH: TensorSpec(codec="onebit", shape=[5, 13], axis="both", error=0.5),
    SCALAR: TensorSpec(codec="onebit", shape=[3, 8], axis="scalar"),
    IN: TensorSpec(codec="onebit", shape=[3, 16], axis="in"),
    NORM: TensorSpec(codec="whole", shape=[10]),
}


def tiny_onebit(name: str) -> SignPlane:
    """The coded matrix of a name, of numbers that FP16 holds exactly."""
    return tiny_plane(SPECS[name])


def tiny_plane(spec: TensorSpec, number: int = 0) -> SignPlane:
    """One plane of a coded matrix; each has signs of its own, and a quarter of the scales of the one before."""
    out_features, in_features = spec.base_rows, spec.shape[1]
    order = torch.arange(out_features * in_features).view(out_features, in_features)
    signs = pack_signs((order * 7 + number) % 5 < 2)
    scale_out, scale_in, gain = ramp(out_features), ramp(in_features), 4.0**-number
    if spec.axis == "in":
        return SignPlane(signs, in_features, gain * 2.0**-20, scale_in=scale_in)
    if spec.axis == "scalar":
        return SignPlane(signs, in_features, gain * 2.0**-9, scale_out[1:2])
    return SignPlane(
        signs, in_features, gain * 2.0**-14, scale_out, scale_in if spec.axis == "both" else None
    )


def added_rows() -> Tensor:  # [2, 10] float16
    return ramp(20).view(2, 10) / 64


def norm() -> Tensor:  # [10] bfloat16
    return 1 + ramp(10).bfloat16() / 16


def ramp(length: int) -> Tensor:  # [length] float16
    """Eighths from 1 up, every third negative."""
    values = 1 + torch.arange(length) / 8
    return torch.where(torch.arange(length) % 3 == 2, -values, values).half()


def tiny_manifest(device_bytes: int) -> Manifest:
    return Manifest(
        base_id=BASE.id,
        base_fingerprint=BASE.fingerprint,
        method="per-axis",
        tied=True,
        device_bytes=device_bytes,
        config=dict(BASE.config),
        tensors=SPECS,
        files=list(FILES),
        compressor={"version": "0.1.0", "method": "per-axis"},
        fidelity={"kl": 0.25},
    )


def write_tiny(path: Path) -> str:
    """Write the artifact and return its digest."""
    with ArtifactWriter(path) as writer:
        for name, spec in SPECS.items():
            if spec.codec == "onebit":
                delta = MatrixDelta((tiny_onebit(name),))
                writer.add_onebit(name, delta, added_rows() if spec.added_rows else None)
            else:
                writer.add_whole(name, norm())
        for filename, content in FILES.items():
            writer.add_file(filename, content)
        return writer.finish(tiny_manifest(writer.device_bytes))
