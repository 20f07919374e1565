"""The model card of a delta: README.md with metadata for the Hugging Face hub, and its figures, replaced together.

`template.md` has the text. Names and continuations come from fine-tunes, which are not trusted: each stands in a code
span.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import string
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from math import pi, sqrt
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from compressor.model_card.facts import DeltaFacts, ErrorGrid, TensorFacts, by_module, grouped
from compressor.sources import HUB_ID
from compressor.tasks import Example
from deltastore.console import size_text
from deltastore.errors import StorageFull, UsageError
from deltastore.format.matrix import AXES

CARD, SIZE_FIGURE, ERROR_FIGURE = "README.md", "size.png", "error.png"
FILES = (SIZE_FIGURE, ERROR_FIGURE, CARD)
FULL = (errno.ENOSPC, errno.EDQUOT)
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
# Jinja2 in Markdown; the arguments are those of `_model_card`.
TEMPLATE = Path(__file__).with_name("template.md")
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode categories of characters without a glyph
JOINERS = "\u200c\u200d"  # needed by scripts and emoji


def check_card_directory(directory: Path) -> None:
    """Check that a card can be written, before any work is done for it. Leaves nothing behind.

    Raises:
        UsageError: matplotlib is not installed, `directory` is none or cannot be written to, or its README.md is not
            a card that `write_card` wrote.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(f"`report` {directory}: its figures need matplotlib: pip install 'peraxis[report]'")
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(
            f"`report` {directory}: {existing} is no directory: choose another, or a name for a new one"
        )
    if taken := [name for name in FILES if (directory / name).is_dir()]:
        raise UsageError(f"`report` {directory}: {taken[0]} in it is a directory: choose another `report`")
    try:
        tempfile.TemporaryFile(dir=existing).close()
        is_other = (directory / CARD).exists() and MARK.encode() not in (directory / CARD).read_bytes()
    except OSError as error:
        raise UsageError(
            f"`report` {directory}: {existing}: {error.strerror}: choose another `report`"
        ) from error
    if is_other:
        raise UsageError(
            f"`report` {directory}: its {CARD} is not a card of a delta: move it away, or choose another `report`"
        )


def write_card(directory: Path, facts: DeltaFacts) -> None:
    """Write README.md and its figures in place of those of an older card; other files stay as they are.

    The same facts give the same bytes. Without errors in the manifest there is no figure of them.

    Raises:
        StorageFull: the disk is full.
        UsageError: as `check_card_directory`.
    """
    check_card_directory(directory)
    # Deferred, because matplotlib takes a second to import and is an extra.
    from compressor.model_card.figures import error_figure, size_figure

    files = {SIZE_FIGURE: size_figure(_part_sizes(facts), _size_texts(facts))}
    grid = ErrorGrid.of(facts.tensors)
    if grid.known:
        files[ERROR_FIGURE] = error_figure(grid)
    files[CARD] = str(_model_card(facts)).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory, files)
    except OSError as error:
        kind = StorageFull if error.errno in FULL else UsageError
        raise kind(
            f"`report` {directory}: {error.strerror}: free some space there or choose another `report`"
        ) from error


def _replace(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write all contents to the disk before the first name changes."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".card.") as partial:
        for name, content in files.items():
            with Path(partial, name).open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        for name in files:
            os.replace(Path(partial, name), directory / name)
    # The older card's figures, which the new one does not refer to.
    for name in set(FILES) - files.keys():
        (directory / name).unlink(missing_ok=True)


def _model_card(facts: DeltaFacts) -> ModelCard:
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
        sizes=table(("Part", "Bytes"), zip(_part_sizes(facts), _size_texts(facts), strict=True)),
        axes=_axes(facts.tensors),
        error_figure=ERROR_FIGURE,
        errors=f"{min(known):.4g} to {max(known):.4g}" if known else "",
        budget=_budget(facts.tensors),
        num_tensors=len(facts.tensors),
        tensors=_tensors(facts.tensors),
        settings=json.dumps(manifest.compressor, indent=2),
    )
    return card


def _part_sizes(facts: DeltaFacts) -> dict[str, int]:
    """Return the artifact's bytes by what they are for, the largest first."""
    present = [(PART_NAMES[kind], size) for kind, size in facts.sizes.items() if size]
    return dict(sorted(present, key=lambda item: -item[1]))


def _size_texts(facts: DeltaFacts) -> list[str]:
    """Return size and share of each part, in the order of `_part_sizes`."""
    total = facts.written.artifact_bytes
    return [f"{size_text(size)} ({size / total:.1%})" for size in _part_sizes(facts).values()]


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


def code(text: str) -> str:
    """Return `text` as an inline code span that no character of it can end; "" for no text."""
    shown = visible(text)
    if "`" not in shown and "|" not in shown:
        return f"`{shown}`" if shown else ""
    # A backtick ends a code span and a pipe ends a table cell; a character reference does neither.
    referenced = "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in shown)
    return f"<code>{referenced}</code>"


def visible(text: str) -> str:
    """Return `text` on one line, with every invisible character replaced by a visible one."""
    return text if text.isprintable() else "".join(map(_glyph, text))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _glyph(character: str) -> str:
    if character in "\n\t":
        return "↵" if character == "\n" else "→"
    is_seen = unicodedata.category(character) not in UNSEEN or character in JOINERS
    return character if is_seen else f"⟨U+{ord(character):04X}⟩"
