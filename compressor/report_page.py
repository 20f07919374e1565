"""A report as one HTML page with nothing outside it: what stands in each section, as text for the template.

Knows reports and figures; writes no files. All text may come from strangers: the template escapes it, and characters
that cannot be seen are made visible here.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from math import pi, sqrt
from typing import Any

from jinja2 import Environment, StrictUndefined

from compressor.evaluate.examples import Example
from compressor.report import Report
from compressor.report_figures import Png, Versions, axis_figure, error_figure, size_figure
from compressor.report_tensors import (
    AXES,
    CarriedTensor,
    axis_counts,
    by_layer,
    error_grid,
    modules_with_more,
    with_more,
)

TEMPLATE = "report.html.jinja"
MAX_ROWS = 3000  # of the table of tensors
MAX_SETTINGS = 60
MAX_VALUE_CHARS = 200
NUM_LARGEST = 10
NUM_WITH_MORE = 200
KIND_TEXT = {
    "signs": "signs", "scales": "scales", "low_rank": "low-rank residuals", "added": "added rows",
    "whole": "whole tensors", "files": "tokenizer and other files", "overhead": "header and padding",
}  # fmt: skip
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode's categories of what shows nothing by itself
JOINERS = "\u200c\u200d"  # which scripts and emoji need
GAUSSIAN_ERROR = sqrt(
    1 - 2 / pi
)  # of normally distributed differences, coded by their signs and one best scale


def figures_of(report: Report) -> dict[str, Versions]:
    """The figures that the report has something to show in, by name."""
    sizes, counts, grid = _sizes(report), axis_counts(report.tensors), error_grid(report.tensors)
    total = report.size_bytes
    texts = [f"{_size(size)}  ({_percent(size / total)})" for size in sizes.values()]
    figures = {"size": size_figure(sizes, texts)}
    if counts:
        figures["axis_counts"] = axis_figure(counts)
    if grid.known:
        figures["error"] = error_figure(grid)
    return figures


def page(report: Report, figures: Mapping[str, Versions]) -> str:
    """The page; it looks at nothing outside itself."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string(files("compressor").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    grid = error_grid(report.tensors)
    return template.render(
        name=_visible(report.name),
        base_id=_visible(report.manifest.base_id),
        finetune_id=_visible(report.finetune_id),
        size=_size(report.size_bytes),
        full_size=_size(report.full_bytes),
        ratio=f"{report.ratio:.2f}",
        facts=list(_facts(report)),
        settings=list(islice(_settings(report.manifest.compressor), MAX_SETTINGS)),
        fidelity=_fidelity(report.manifest.fidelity),
        examples=[_example(example) for example in report.examples],
        sizes=[
            (kind, _size(size), _percent(size / report.size_bytes)) for kind, size in _sizes(report).items()
        ],
        axes=_axis_table(report.tensors),
        error=None if not grid.known else (f"{min(grid.known):.4g}", f"{max(grid.known):.4g}"),
        has_gaps=any(None in row for row in grid.values),
        gaussian_error=f"{GAUSSIAN_ERROR:.2f}",
        largest=_largest(report.tensors),
        more=_more(report.tensors),
        layers=_layers(report.tensors),
        num_tensors=len(report.tensors),
        max_rows=MAX_ROWS,
        figures={name: _figure(figure) for name, figure in figures.items()},
    )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    if report.finetune_id:
        yield "Fine-tune", _visible(report.finetune_id)
    yield "Base", _visible(manifest.base_id)
    yield "Base fingerprint", manifest.base_fingerprint
    yield "Digest", f"sha256:{report.digest}"
    yield "Method", manifest.method
    yield "On the device", _size(manifest.device_bytes)
    yield "Tensors", f"{len(report.tensors)} changed, {report.num_unchanged} as in the base"
    yield "Output head", "tied to the input embedding" if manifest.tied else "not tied to the input embedding"
    yield "Files", ", ".join(manifest.files) or "none: the base's tokenizer and generation config"


def _settings(compressor: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What made the artifact and how, as lines of text."""
    settings = compressor.get("settings")
    if isinstance(settings, dict):
        yield from _flat(settings)
        yield from _flat({key: value for key, value in compressor.items() if key != "settings"})
    else:
        yield from _flat(compressor)


def _flat(facts: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as lines of text."""
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            text = text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"
            yield _visible(f"{path}{key}"[:MAX_VALUE_CHARS]), _visible(text)


def _fidelity(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What of the expected figures is there, as text; '–' stands for each that is not."""
    delta, base = facts.get("held_out"), facts.get("base")
    delta, base = (some if isinstance(some, dict) else {} for some in (delta, base))
    rows = [
        ("base", _number(base, "kl"), _share(base, "agreement"), _number(base, "perplexity")),
        ("delta", _number(delta, "kl"), _share(delta, "agreement"), _number(delta, "perplexity")),
        ("fine-tune", "0", "100%", _number(delta, "perplexity_finetune")),
    ]
    ours, theirs = _float(delta, "kl"), _float(base, "kl")
    kept = None if ours is None or not theirs else 1 - ours / theirs
    return {
        "is_measured": bool(delta),
        "rows": rows if base else rows[1:],
        "has_base": bool(base),
        "kl": _number(delta, "kl"),
        "base_kl": _number(base, "kl"),
        "agreement": _share(delta, "agreement"),
        "base_agreement": _share(base, "agreement"),
        "kept": None if kept is None else f"{100 * kept:.2f}%",
        "num_tokens": _number(delta, "num_tokens"),
        "weight_error": _number(facts, "weight_error"),
    }


def _float(facts: Mapping[str, Any], key: str) -> float | None:
    value = facts.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(facts: Mapping[str, Any], key: str) -> str:
    value = _float(facts, key)
    return "–" if value is None else f"{value:,.0f}" if isinstance(facts[key], int) else f"{value:.4g}"


def _share(facts: Mapping[str, Any], key: str) -> str:
    value = _float(facts, key)
    return "–" if value is None else f"{100 * value:.2f}%"


def _example(example: Example) -> dict[str, Any]:
    """A prompt and each model's text, cut where it begins to differ from the fine-tune's."""
    texts = {"base": example.base, "fine-tune": example.finetune, "delta": example.delta}
    columns = [_column(model, text, example.finetune) for model, text in texts.items()]
    return {"prompt": _visible(example.prompt), "columns": columns}


def _column(model: str, text: str, finetune: str) -> dict[str, Any]:
    same = _num_shared(text, finetune)
    where = f"after {same} character{'' if same == 1 else 's'}" if same else "from the start"
    note = "the same" if text == finetune else f"differs {where}"
    return {
        "model": model,
        "same": _visible(text[:same]),
        "rest": _visible(text[same:]),
        "note": "" if model == "fine-tune" else note,
        "ends": same == len(text) < len(finetune),
    }


def _num_shared(one: str, other: str) -> int:
    """Characters before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _sizes(report: Report) -> dict[str, int]:
    """Bytes by what they are for, the largest first."""
    present = [(KIND_TEXT[kind], size) for kind, size in report.sizes.items() if size]
    return dict(sorted(present, key=lambda item: -item[1]))


def _axis_table(tensors: Sequence[CarriedTensor]) -> dict[str, Any]:
    counts = axis_counts(tensors)
    axes = [axis for axis in AXES if any(counter[axis] for counter in counts.values())]
    rows = [(_visible(module), [counter[axis] for axis in axes]) for module, counter in counts.items()]
    return {"axes": axes, "rows": rows}


def _largest(tensors: Sequence[CarriedTensor]) -> list[tuple[str, str]]:
    known = [(tensor.spec.error, tensor.name) for tensor in tensors if tensor.spec.error is not None]
    return [
        (_visible(name), f"{error:.4f}")
        for error, name in sorted(known, key=lambda item: -item[0])[:NUM_LARGEST]
    ]


def _more(tensors: Sequence[CarriedTensor]) -> dict[str, Any]:
    """What got more than one bit per weight, by module type and by matrix."""
    chosen = with_more(tensors)
    modules = [
        (
            _visible(module),
            f"{len(some)} of {num_all}",
            _span(tensor.spec.planes for tensor in some),
            _span(tensor.spec.rank for tensor in some),
            _size(sum(tensor.extra_bytes for tensor in some)),
        )
        for module, num_all, some in modules_with_more(tensors)
    ]
    matrices = [
        (_visible(tensor.name), tensor.spec.planes, tensor.spec.rank, _size(tensor.extra_bytes))
        for tensor in chosen[:NUM_WITH_MORE]
    ]
    total = _size(sum(tensor.extra_bytes for tensor in chosen))
    return {"modules": modules, "matrices": matrices, "count": len(chosen), "total": total}


def _layers(tensors: Sequence[CarriedTensor]) -> list[dict[str, Any]]:
    """All tensors, layer by layer; experts of one kind in one row. Of too many, the first."""
    sections, left = [], MAX_ROWS
    for layer, groups in by_layer(tensors).items():
        if left <= 0:
            break
        rows = [_row(group) for group in groups[:left]]
        left -= len(rows)
        size = _size(sum(tensor.num_bytes for group in groups for tensor in group))
        title = "Outside the layers" if layer is None else f"Layer {str(layer)[:20]}"
        sections.append({"title": title, "rows": rows, "size": size})
    return sections


def _row(group: Sequence[CarriedTensor]) -> list[str]:
    first, specs = group[0], [tensor.spec for tensor in group]
    shapes = {tuple(spec.shape) for spec in specs}
    axes = Counter(sorted(spec.axis or "whole" for spec in specs))
    errors = [spec.error for spec in specs if spec.error is not None]
    return [
        _visible(first.name if len(group) == 1 else f"{first.place.pattern}  ({len(group)})"),
        " × ".join(map(str, specs[0].shape)) if len(shapes) == 1 else "various",
        ", ".join(axes if len(axes) == 1 else (f"{axis} {count}" for axis, count in axes.items())),
        _span(spec.planes if spec.axis else 0 for spec in specs),
        _span(spec.rank for spec in specs),
        _span(spec.added_rows for spec in specs),
        _span(spec.num_zeros for spec in specs),
        ""
        if not errors
        else f"{min(errors):.4f}"
        if len(group) == 1
        else f"{min(errors):.3f}–{max(errors):.3f}",
        _size(sum(tensor.num_bytes for tensor in group)),
    ]


def _span(numbers: Iterable[int]) -> str:
    """One number, or the smallest and the largest; nothing for zero."""
    found = list(numbers)
    low, high = min(found), max(found)
    return "" if not high else str(high) if low == high else f"{low}–{high}"


def _figure(figure: Versions) -> dict[str, Any]:
    images = {name: getattr(figure, name) for name in ("light", "dark", "narrow_light", "narrow_dark")}
    return {
        name: {"uri": _uri(png), "width": png.width, "height": png.height} for name, png in images.items()
    }


def _uri(image: Png) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.data).decode()}"


def _visible(text: str) -> str:
    """Text in which every character can be seen; line breaks remain where they are."""
    if text.isprintable():
        return text
    return "".join(map(_seen, text))


def _seen(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "→\t"
    is_seen = unicodedata.category(character) not in UNSEEN or character in JOINERS
    return character if is_seen else f"⟨U+{ord(character):04X}⟩"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 else "<0.1%"


def _size(num_bytes: int) -> str:
    """Bytes in three digits."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    digits = 0 if units[0] == "B" else max(0, 3 - len(str(int(size))))
    return f"{size:.{digits}f} {units[0]}"
