"""What tests of the report share: reports of made-up tensors, and what stands on a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from compressor.evaluate.examples import Example
from compressor.report import Report, write_report
from compressor.report_tensors import CarriedTensor, Place
from deltastore.format.manifest import Manifest, TensorSpec
from deltastore.format.onebit import Axis

HELD_OUT = {
    "kl": 0.0021, "agreement": 0.9812, "perplexity": 6.51, "perplexity_finetune": 6.5, "num_tokens": 2496,
}  # fmt: skip
OF_BASE = {**HELD_OUT, "kl": 0.42, "agreement": 0.7012, "perplexity": 9.8}


def onebit(axis: Axis = "out", error: float | None = 0.5, **fields: Any) -> TensorSpec:
    return TensorSpec(codec="onebit", shape=[16, 32], axis=axis, error=error, **fields)


def model_of(
    num_layers: int, modules: tuple[str, ...] = ("self_attn.q_proj", "mlp.down_proj")
) -> dict[str, TensorSpec]:
    """Specs by name, with an embedding and a norm."""
    layers = [f"model.layers.{layer}.{module}.weight" for layer in range(num_layers) for module in modules]
    errors = {name: onebit(error=0.4 + number / 1e4) for number, name in enumerate(layers)}
    norm = TensorSpec(codec="whole", shape=[32])
    return {"model.embed_tokens.weight": onebit("in"), **errors, "model.norm.weight": norm}


def report_of(
    specs: Mapping[str, TensorSpec],
    fidelity: Mapping[str, Any] | None = None,
    examples: tuple[Example, ...] = (),
    name: str = "tuned.safetensors",
    **manifest: Any,
) -> Report:
    """A report of tensors that are in no file; each takes a kilobyte of signs, or of a whole tensor."""
    sizes = {spec: {"signs" if specs[spec].axis else "whole": 1000} for spec in specs}
    tensors = [
        CarriedTensor(n, spec, sizes[n], 1000 * (spec.planes - 1), Place.of(n)) for n, spec in specs.items()
    ]
    num_coded = sum(spec.axis is not None for spec in specs.values())
    facts = {"base_id": "tiny", "compressor": {"version": "0.1.0", "settings": {"method": "per-axis"}}}
    return Report(
        name=name,
        finetune_id="tuned",
        digest="ab" * 32,
        size_bytes=1000 * len(specs) + 4096,
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
            **{**facts, **manifest},
        ),
        tensors=tuple(tensors),
        sizes={"signs": 1000 * num_coded, "whole": 1000 * (len(specs) - num_coded), "overhead": 4096},
        examples=examples,
    )


class Page(HTMLParser):
    """A written page: its text without markup, and its tags."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.html = (directory / "report.html").read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(self.html)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    def marked(self) -> list[str]:
        """What stands in each mark, of examples alone."""
        examples = self.html.partition("<article>")[2]
        return re.findall(r"<mark[^>]*>(.*?)</mark>", examples, re.DOTALL)


def page_of(report: Report, directory: Path) -> Page:
    write_report(directory, report)
    return Page(directory)
