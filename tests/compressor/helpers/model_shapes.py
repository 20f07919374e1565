"""Shapes of models that are too large to run in a test."""

from __future__ import annotations

from bench.synthetic import LlamaShapes
from compressor.memory import ModelShapes
from deltastore.format.sizes import is_matrix

QWEN_1B5 = LlamaShapes(28, hidden=1536, intermediate=8960, kv=256, vocabulary=151936)
LLAMA_8B = LlamaShapes(32, hidden=4096, intermediate=14336, kv=1024, vocabulary=128256)


def shapes_of(shapes: LlamaShapes) -> ModelShapes:
    tensors = dict(shapes.tensors())
    blocks = [
        {name: shape for name, shape in tensors.items() if name.startswith(f"model.layers.{layer}.")}
        for layer in range(shapes.num_layers)
    ]
    coded = {name: (shape[0], shape[1]) for name, shape in tensors.items() if is_matrix(name, shape)}
    return ModelShapes(blocks, (shapes.vocabulary, shapes.hidden), False, coded, 2 * shapes.kv)
