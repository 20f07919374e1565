"""Facts of deltas that are in no file, and written model cards rendered as a hub would render them."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from markdown_it import MarkdownIt

from compressor.model_card import CARD, DeltaFacts, TensorFacts, write_card
from compressor.tasks import Example
from compressor.writer import WrittenDelta
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.matrix import Axis

HELD_OUT = {
    "kl": 0.0021, "agreement": 0.9812, "perplexity": 6.51, "perplexity_finetune": 6.5, "num_tokens": 2496,
}  # fmt: skip
OF_BASE = {**HELD_OUT, "kl": 0.42, "agreement": 0.7012, "perplexity": 9.8}


def onebit(axis: Axis = "out", error: float | None = 0.5, **fields: Any) -> TensorSpec:
    return TensorSpec(codec="onebit", shape=[16, 32], axis=axis, error=error, **fields)


def model_of(
    num_layers: int, modules: tuple[str, ...] = ("self_attn.q_proj", "mlp.down_proj")
) -> dict[str, TensorSpec]:
    """Return specs by name, with an embedding and a norm."""
    layers = [f"model.layers.{layer}.{module}.weight" for layer in range(num_layers) for module in modules]
    errors = {name: onebit(error=0.4 + number / 1e4) for number, name in enumerate(layers)}
    norm = TensorSpec(codec="whole", shape=[32])
    return {"model.embed_tokens.weight": onebit("in"), **errors, "model.norm.weight": norm}


def facts_of(
    specs: Mapping[str, TensorSpec],
    fidelity: Mapping[str, Any] | None = None,
    examples: tuple[Example, ...] = (),
    name: str = "tuned.safetensors",
    **manifest: Any,
) -> DeltaFacts:
    """Return facts of tensors that are in no file; each takes a kilobyte of signs, or of a whole tensor."""
    tensors = [TensorFacts.of(n, spec, 1000, 1000 * (spec.planes - 1)) for n, spec in specs.items()]
    num_coded = sum(spec.axis is not None for spec in specs.values())
    settings = {"base_id": "tiny", "compressor": {"version": "0.1.0", "settings": {"method": "per-axis"}}}
    written = WrittenDelta(
        out=Path("/out", name),
        digest="ab" * 32,
        artifact_bytes=1000 * len(specs) + 4096,
        full_bytes=16000 * len(specs) + 4096,
        num_unchanged=3,
        manifest=Manifest(
            base_fingerprint="5f" * 32,
            method="per-axis",
            tied=False,
            device_bytes=1000 * len(specs),
            config={},
            tensors=dict(specs),
            files=[],
            fidelity=dict(fidelity or {}),
            **{**settings, **manifest},
        ),
    )
    sizes = {"signs": 1000 * num_coded, "whole": 1000 * (len(specs) - num_coded), "overhead": 4096}
    return DeltaFacts(written, "tuned", tensors, sizes, examples)


class RenderedCard(HTMLParser):
    """A written card: its metadata, its text without markup, its tags, and the cells of its tables."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.content = (directory / CARD).read_text(encoding="utf-8")
        card = ModelCard(self.content)
        assert isinstance(card.data, ModelCardData)
        self.data = card.data
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._pieces: list[str] = []
        self._is_cell = False
        # HTML is let through, so that a card that forgets to escape is seen.
        self.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text))
        self.text = " ".join(" ".join(self._pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        self._pieces.append(data)
        if self._is_cell:
            self.rows[-1][-1] += data


def card_of(facts: DeltaFacts, directory: Path) -> RenderedCard:
    write_card(directory, facts)
    return RenderedCard(directory)
