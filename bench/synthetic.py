"""Write a full checkpoint and a delta with a Llama's shapes and random contents, for benches that only move bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltastore.base import Base
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane, packed_width
from deltastore.format.sizes import is_matrix
from deltastore.registry.uploads import CHUNK_BYTES, ChunkedDigest
from deltastore.verified_object import ObjectSource

SHARD_BYTES = 512 << 20
TOKENIZER_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class LlamaShapes:
    """Sizes of a Llama, by default those of a 1B model; the number of layers sets the bytes."""

    num_layers: int
    hidden: int = 2048
    intermediate: int = 5632
    kv: int = 512
    vocabulary: int = 32000
    head_dim: int = 64
    tied: bool = False  # the output head is the embedding

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """Output and input features of the linear layers of one block."""
        return tuple((shape[0], shape[1]) for shape in self._layer().values() if len(shape) == 2)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes in layer order."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.num_layers):
            for name, shape in self._layer().items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _layer(self) -> dict[str, tuple[int, ...]]:
        return {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.kv, self.hidden),
            "self_attn.v_proj": (self.kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


def write_checkpoint(directory: Path, shapes: LlamaShapes) -> list[Path]:
    """Write an FP16 checkpoint as `save_pretrained` lays it out, sharded, and return its shards."""
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in shapes.tensors():
        if sum(tensor.nbytes for tensor in shards[-1].values()) >= SHARD_BYTES:
            shards.append({})
        shards[-1][name] = torch.empty(shape, dtype=torch.float16).normal_(std=0.02, generator=generator)
    paths = [directory / f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for shard, path in zip(shards, paths, strict=True):
        save_file(shard, path, metadata={"format": "pt"})
    weight_map = {name: path.name for shard, path in zip(shards, paths, strict=True) for name in shard}
    total_size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def write_delta(
    path: Path,
    shapes: LlamaShapes,
    seed: int = 1,
    files: Mapping[str, bytes] | None = None,
    base: Base | None = None,
) -> ObjectSource:
    """Write an artifact of random signs, whole norms and `files`; return what a registry records of it.

    By default its one file has the size of a tokenizer and no contents. A server serves it only if `base` is its own.
    """
    files = {"tokenizer.json": bytes(TOKENIZER_BYTES)} if files is None else files
    generator = torch.Generator().manual_seed(seed)
    specs: dict[str, TensorSpec] = {}
    with ArtifactWriter(path) as writer:
        for name, shape in shapes.tensors():
            if is_matrix(name, shape):
                writer.add_onebit(name, MatrixDelta((_random_onebit(shape, generator),)))
                specs[name] = TensorSpec(codec="onebit", shape=list(shape), axis="out")
            else:
                writer.add_whole(name, torch.ones(shape, dtype=torch.float16))
                specs[name] = TensorSpec(codec="whole", shape=list(shape))
        for name, content in files.items():
            writer.add_file(name, content)
        writer.finish(_manifest(specs, writer.device_bytes, list(files), shapes.tied, base))
    return _source(path)


def write_norm_delta(
    path: Path, shapes: LlamaShapes, seed: int, files: Mapping[str, bytes], base: Base
) -> None:
    """Write an artifact that changes the last norm alone, and has `files`: a small one of a large base."""
    generator = torch.Generator().manual_seed(seed)
    name = "model.norm.weight"
    with ArtifactWriter(path) as writer:
        writer.add_whole(
            name, torch.ones(shapes.hidden) + torch.rand(shapes.hidden, generator=generator) / 100
        )
        for file_name, content in files.items():
            writer.add_file(file_name, content)
        specs = {name: TensorSpec(codec="whole", shape=[shapes.hidden])}
        writer.finish(_manifest(specs, writer.device_bytes, list(files), shapes.tied, base))


def write_whole_delta(path: Path, shapes: LlamaShapes, base: Base) -> None:
    """Write an artifact for `base` that holds every tensor whole, random values in float32: 4 bytes per weight."""
    generator = torch.Generator().manual_seed(1)
    specs = {name: TensorSpec(codec="whole", shape=list(shape)) for name, shape in shapes.tensors()}
    with ArtifactWriter(path) as writer:
        for name, shape in shapes.tensors():
            writer.add_whole(name, torch.empty(shape).normal_(std=0.02, generator=generator))
        writer.finish(_manifest(specs, writer.device_bytes, [], shapes.tied, base))


def _random_onebit(shape: tuple[int, ...], generator: torch.Generator) -> SignPlane:
    out_features, in_features = shape
    packed = (out_features, packed_width(in_features))
    signs = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
    return SignPlane(signs, in_features, 2.0**-10, scale_out=torch.ones(out_features, dtype=torch.float16))


def _manifest(
    specs: dict[str, TensorSpec], device_bytes: int, files: list[str], tied: bool, base: Base | None
) -> Manifest:
    return Manifest(
        base_id=base.id if base else "synthetic",
        base_fingerprint=base.fingerprint if base else "0" * 64,
        method="per-axis",
        tied=tied,
        device_bytes=device_bytes,
        config=dict(base.config) if base else {},
        tensors=specs,
        files=files,
        compressor={},
        fidelity={},
    )


def _source(path: Path) -> ObjectSource:
    digest = ChunkedDigest()
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(memoryview(block))
    with Artifact.open(path) as artifact:
        data_start, device_bytes = artifact.header.data_start, artifact.manifest.device_bytes
    return ObjectSource(
        path, digest.digest(), digest.num_bytes, data_start, device_bytes, digest.chunk_digests()
    )
