"""The text of a model card: metadata for the Hugging Face hub, and what fills `template.md` for one delta.

Writes no files. Every string of a fine-tune stands in a code span of `markdown.py`.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import pi, sqrt
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from compressor.evaluate.examples import Example
from compressor.io.sources import HUB_ID
from compressor.model_card.facts import DeltaFacts, ErrorGrid, TensorFacts, by_module, grouped
from compressor.model_card.markdown import code, table, visible
from deltastore.format.sign_plane import AXES
from deltastore.quantities import size_text

SIZE_FIGURE, ERROR_FIGURE = "size.png", "error.png"
MARK = "<!-- Written by peraxis compress --report, which replaces this file. -->"
METRICS = {
    "kl": "KL to the fine-tune, nats per token",
    "agreement": "same next token",
    "perplexity": "perplexity",
}
PART_NAMES = {
    "signs": "signs", "scales": "scales", "low_rank": "low-rank residuals", "added": "added rows",
    "whole": "whole tensors", "files": "tokenizer and other files", "overhead": "header and padding",
}  # fmt: skip
# The least relative error of normally distributed differences, coded by their signs and one scale.
GAUSSIAN_ERROR = sqrt(1 - 2 / pi)
# Uploads a delta to a server on this machine.
UPLOAD = "curl -X POST 'localhost:8000/variants?name=NAME' -H 'Content-Type: application/octet-stream'"
# Jinja2 in Markdown; the arguments are those of `model_card`.
TEMPLATE = Path(__file__).with_name("template.md")


def model_card(facts: DeltaFacts) -> ModelCard:
    """Return the card of a delta; it refers to its figures by file name."""
    manifest, known = facts.written.manifest, ErrorGrid.of(facts.tensors).known
    file, base = shlex.quote(visible(facts.written.out.name)), shlex.quote(visible(manifest.base_id))
    commands = f"{UPLOAD} --data-binary @{file}\nperaxis merge --base {base} --delta {file} --out DIR"
    card: ModelCard = ModelCard.from_template(
        _metadata(facts),
        template_str=TEMPLATE.read_text(encoding="utf-8").replace("%}\n", "%}"),
        mark=MARK,
        name=code(facts.written.out.name),
        base=code(manifest.base_id),
        finetune=code(facts.finetune_id),
        commands=commands,
        identity=_identity(facts),
        **_fidelity(manifest.fidelity),
        gaussian_error=f"{GAUSSIAN_ERROR:.2f}",
        examples="\n\n".join(map(_example, facts.examples)),
        size_figure=SIZE_FIGURE,
        sizes=table(("Part", "Bytes"), zip(part_sizes(facts), size_texts(facts), strict=True)),
        axes=_axes(facts.tensors),
        error_figure=ERROR_FIGURE,
        errors=f"{min(known):.4g} to {max(known):.4g}" if known else "",
        budget=_budget(facts.tensors),
        num_tensors=len(facts.tensors),
        tensors=_tensors(facts.tensors),
        settings=json.dumps(manifest.compressor, indent=2),
    )
    return card


def part_sizes(facts: DeltaFacts) -> dict[str, int]:
    """Return the artifact's bytes by what they are for, the largest first."""
    present = [(PART_NAMES[kind], size) for kind, size in facts.sizes.items() if size]
    return dict(sorted(present, key=lambda item: -item[1]))


def size_texts(facts: DeltaFacts) -> list[str]:
    """Return size and share of each part, in the order of `part_sizes`."""
    total = facts.written.artifact_bytes
    return [f"{size_text(size)} ({size / total:.1%})" for size in part_sizes(facts).values()]


def _metadata(facts: DeltaFacts) -> ModelCardData:
    base_id, held_out = facts.written.manifest.base_id, facts.written.manifest.fidelity.get("held_out")
    results = [
        EvalResult("text-generation", "text", "held-out text", metric, value, metric_name=name)
        for metric, name in METRICS.items()
        if (value := _number(held_out, metric)) is not None
    ]
    return ModelCardData(
        # The hub refuses anything but a hub id, and a name without an owner may be that of a directory.
        base_model=base_id if "/" in base_id and HUB_ID.fullmatch(base_id) else None,
        library_name="peraxis",
        tags=["peraxis", "delta", "1-bit"],
        model_name=visible(facts.written.out.name) if results else None,
        eval_results=results or None,
    )


def _identity(facts: DeltaFacts) -> str:
    written, manifest = facts.written, facts.written.manifest
    rows = {
        "Size": f"{size_text(written.artifact_bytes)}, {written.ratio:.2f} times smaller than the fine-tune at 16 bits "
        f"({size_text(written.full_bytes)})",
        "On the device": size_text(manifest.device_bytes),
        "Digest": code(f"sha256:{written.digest}"),
        "Base fingerprint": code(manifest.base_fingerprint),
        "Method": manifest.method,
        "Tensors": f"{len(manifest.tensors)} changed, {written.num_unchanged} as in the base",
        "Output head": "tied to the input embedding" if manifest.tied else "not tied to the input embedding",
        "Files": ", ".join(map(code, manifest.files)) or "none: the base's tokenizer and generation config",
    }
    return table(("", ""), rows.items())


def _fidelity(facts: Mapping[str, Any]) -> dict[str, str]:
    delta, base = facts.get("held_out"), facts.get("base")
    rows = [
        (model, _text(row, "kl"), _text(row, "agreement", ".2%"), _text(row, "perplexity"))
        for model, row in (("base", base), ("delta", delta))
        if row
    ]
    rows.append(("fine-tune", "0", "100%", _text(delta, "perplexity_finetune")))
    ours, theirs = _number(delta, "kl"), _number(base, "kl")
    return {
        "fidelity": table(("Model", "KL to fine-tune", "Same next token", "Perplexity"), rows)
        if delta
        else "",
        "num_tokens": _text(delta, "num_tokens", ","),
        "kept": f"{1 - ours / theirs:.2%}" if ours is not None and theirs else "",
        "weight_error": _text(facts, "weight_error") if "weight_error" in facts else "",
    }


def _example(example: Example) -> str:
    texts = {"base": example.base, "fine-tune": example.finetune, "delta": example.delta}
    rows = [(model, *_compared(text, example.finetune)) for model, text in texts.items()]
    return f"Prompt: {code(example.prompt)}\n\n" + table(("Model", "As the fine-tune", "Then"), rows)


def _compared(text: str, finetune: str) -> tuple[str, str]:
    """Return the part of `text` that it shares with the fine-tune's, and the rest."""
    pairs = enumerate(zip(text, finetune, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(text), len(finetune)))
    ends = "*ends here*" if same == len(text) < len(finetune) else ""
    return code(text[:same]), code(text[same:]) or ends


def _axes(tensors: Sequence[TensorFacts]) -> str:
    counts = {
        module: Counter(tensor.spec.axis for tensor in every) for module, every in by_module(tensors).items()
    }
    axes = [axis for axis in AXES if any(counter[axis] for counter in counts.values())]
    rows = [(code(module), *(counter[axis] for axis in axes)) for module, counter in counts.items()]
    return table(("Module type", *axes), rows) if rows else ""


def _budget(tensors: Sequence[TensorFacts]) -> str:
    rows = [
        (
            code(module),
            f"{len(some)} of {len(every)}",
            _span(tensor.spec.planes for tensor in some),
            _span(tensor.spec.rank for tensor in some),
            size_text(sum(tensor.extra_bytes for tensor in some)),
        )
        for module, every in by_module(tensors).items()
        if (some := [tensor for tensor in every if tensor.extra_bytes])
    ]
    return table(("Module type", "Matrices", "Planes", "Rank", "Extra bytes"), rows) if rows else ""


def _tensors(tensors: Sequence[TensorFacts]) -> str:
    head = ("Tensor", "Shape", "Axis", "Planes", "Rank", "Added rows", "Zeros", "Error", "Bytes")
    return table(head, map(_row, grouped(tensors, lambda tensor: tensor.pattern).values()))


def _row(group: Sequence[TensorFacts]) -> list[str]:
    specs = [tensor.spec for tensor in group]
    axes = Counter(sorted(spec.axis or "whole" for spec in specs))
    pattern = code(group[0].pattern)
    return [
        code(group[0].name) if len(group) == 1 else f"{pattern} ({len(group)})",
        " × ".join(map(str, specs[0].shape))
        if len({tuple(spec.shape) for spec in specs}) == 1
        else "various",
        ", ".join(axes if len(axes) == 1 else (f"{axis} {count}" for axis, count in axes.items())),
        _span(spec.planes if spec.axis else 0 for spec in specs),
        _span(spec.rank for spec in specs),
        _span(spec.added_rows for spec in specs),
        _span(spec.num_zeros for spec in specs),
        _span((spec.error for spec in specs if spec.error is not None), ".4f"),
        size_text(sum(tensor.num_bytes for tensor in group)),
    ]


def _span(numbers: Iterable[float], form: str = "") -> str:
    """Return one number, or the smallest and the largest; "" for zero or none."""
    found = sorted(numbers)
    ends = [format(number, form) for number in (*found[:1], *found[-1:])]
    return "–".join(dict.fromkeys(ends)) if found and found[-1] else ""


def _number(facts: object, key: str) -> float | None:
    value = facts.get(key) if isinstance(facts, dict) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(facts: object, key: str, form: str = ".4g") -> str:
    value = _number(facts, key)
    return "–" if value is None else format(value, form)
