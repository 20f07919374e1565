"""The model card of a delta: README.md with metadata for the Hugging Face hub.

`model_card.md` has the text. Names and continuations come from fine-tunes, which are not trusted: each stands in a code
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from compressor.rival import Rival
from compressor.tasks import Example
from compressor.writer import DeltaFile, WrittenDelta
from deltastore.console import size_text
from deltastore.errors import StorageFull, UsageError
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import TensorSpec
from deltastore.format.matrix import AXES
from deltastore.format.sizes import KINDS, extra_bytes, files_bytes, tensor_bytes
from deltastore.hub import repo_of

CARD = "README.md"
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
# Jinja2 in Markdown; the arguments are those of `model_card`.
TEMPLATE = Path(__file__).with_suffix(".md")
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # Unicode categories of characters without a glyph
JOINERS = "\u200c\u200d"  # needed by scripts and emoji

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of the manifest, and where its name says that it stands."""

    name: str
    spec: TensorSpec
    num_bytes: int
    extra_bytes: int  # of further sign planes and a low-rank residual
    module: str  # its type, such as `q_proj`; `experts.w1` for one of many experts
    pattern: str  # the name, with `*` for an expert's number

    @classmethod
    def of(cls, name: str, spec: TensorSpec, num_bytes: int, extra_bytes: int) -> TensorFacts:
        return cls(name, spec, num_bytes, extra_bytes, *_location(name))


def _location(name: str) -> tuple[str, str]:
    """Return module type and pattern of a tensor's name."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [index for index, part in enumerate(parts) if part.isascii() and part.isdigit()]
    if not numbers:
        return parts[-1], name
    if len(numbers) == 1:
        return parts[-1] if numbers[0] < len(parts) - 1 else parts[0], name
    expert = numbers[1]
    module = ".".join([parts[expert - 1], *parts[expert + 1 :]])
    return module, ".".join([*parts[:expert], "*", *parts[expert + 1 :]])


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """A written delta and what was measured of it."""

    written: DeltaFile
    finetune_id: str  # a hub id or a directory's name
    tensors: Sequence[TensorFacts]
    sizes: Mapping[str, int]  # bytes by `KINDS`, and `overhead` for header and padding
    examples: Sequence[Example]
    rival: Rival | None = None

    @classmethod
    def of(
        cls, written: DeltaFile, finetune_id: str, examples: Sequence[Example], rival: Rival | None = None
    ) -> DeltaFacts:
        with Artifact.open(written.out) as artifact:
            by_name = {name: tensor_bytes(artifact, name) for name in written.manifest.tensors}
            sizes = {kind: sum(size.get(kind, 0) for size in by_name.values()) for kind in KINDS}
            sizes["files"] = files_bytes(artifact)
            sizes["overhead"] = artifact.size_bytes - sum(sizes.values())
            tensors = [
                TensorFacts.of(name, spec, sum(size.values()), extra_bytes(artifact, name))
                for (name, spec), size in zip(written.manifest.tensors.items(), by_name.values(), strict=True)
            ]
        return cls(written, finetune_id, tensors, sizes, examples, rival)


def by_module(tensors: Iterable[TensorFacts]) -> dict[str, list[TensorFacts]]:
    """Return the coded matrices of each module type."""
    return grouped((tensor for tensor in tensors if tensor.spec.axis), lambda tensor: tensor.module)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, in the order of their first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def check_card_directory(directory: Path) -> None:
    """Check that a card can be written, before any work is done for it. Leaves nothing behind.

    Raises:
        UsageError: `directory` is none or cannot be written to, or its README.md is not a card that `write_card` wrote.
    """
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(
            f"`report` {directory}: {existing} is no directory: choose another, or a name for a new one"
        )
    if (directory / CARD).is_dir():
        raise UsageError(f"`report` {directory}: {CARD} in it is a directory: choose another `report`")
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
    """Write README.md in place of that of an older card; other files stay as they are.

    The same facts give the same bytes.

    Raises:
        StorageFull: the disk is full.
        UsageError: as `check_card_directory`.
    """
    check_card_directory(directory)
    content = str(model_card(facts)).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".card.") as partial:
            with Path(partial, CARD).open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.replace(Path(partial, CARD), directory / CARD)
    except OSError as error:
        kind = StorageFull if error.errno in FULL else UsageError
        raise kind(
            f"`report` {directory}: {error.strerror}: free some space there or choose another `report`"
        ) from error


def model_card(facts: DeltaFacts) -> ModelCard:
    """Return a delta's card. The size of the fine-tune is in it where `facts` has it."""
    manifest = facts.written.manifest
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
        **_fidelity(manifest.fidelity, facts.rival),
        rival=_rival(facts.rival),
        gaussian_error=f"{GAUSSIAN_ERROR:.2f}",
        examples="\n\n".join(map(_example, facts.examples)),
        sizes=_sizes(facts),
        modules=_modules(facts.tensors),
        budget=_budget(facts.tensors),
        num_tensors=len(facts.tensors),
        tensors=_tensors(facts.tensors),
        settings=json.dumps(manifest.compressor, indent=2),
    )
    return card


def _sizes(facts: DeltaFacts) -> str:
    """Return the artifact's bytes by what they are for, the largest first."""
    total = facts.written.artifact_bytes
    present = sorted(((size, kind) for kind, size in facts.sizes.items() if size), key=lambda item: -item[0])
    rows = [(PART_NAMES[kind], f"{size_text(size)} ({size / total:.1%})") for size, kind in present]
    return table(("Part", "Bytes"), rows)


def _metadata(facts: DeltaFacts) -> ModelCardData:
    base_id, held_out = facts.written.manifest.base_id, facts.written.manifest.fidelity.get("held_out")
    results = [
        EvalResult("text-generation", "text", "held-out text", metric, value, metric_name=name)
        for metric, name in METRICS.items()
        if (value := _number(held_out, metric)) is not None
    ]
    return ModelCardData(
        # The hub refuses anything but a hub id, and a name without an owner may be that of a directory.
        base_model=repo_of(base_id),
        library_name="peraxis",
        tags=["peraxis", "delta", "1-bit"],
        model_name=visible(facts.written.out.name) if results else None,
        eval_results=results or None,
    )


def _identity(facts: DeltaFacts) -> str:
    written, manifest = facts.written, facts.written.manifest
    size, changed = size_text(written.artifact_bytes), f"{len(manifest.tensors)} changed"
    if isinstance(written, WrittenDelta):
        size += f", {written.ratio:.2f} times smaller than the fine-tune at 16 bits ({size_text(written.full_bytes)})"
        changed += f", {written.num_unchanged} as in the base"
    rows = {
        "Size": size,
        "On the device": size_text(manifest.device_bytes),
        "Digest": code(f"sha256:{written.digest}"),
        "Base fingerprint": code(manifest.base_fingerprint),
        "Method": manifest.method,
        "Tensors": changed,
        "Output head": "tied to the input embedding" if manifest.tied else "not tied to the input embedding",
        "Files": ", ".join(map(code, manifest.files)) or "none: the base's tokenizer and generation config",
    }
    return table(("", ""), rows.items())


def _fidelity(facts: Mapping[str, Any], rival: Rival | None) -> dict[str, str]:
    delta, base = facts.get("held_out"), facts.get("base")
    lora = None if rival is None else rival.fidelity.as_json()
    rows = [
        (model, _text(row, "kl"), _text(row, "agreement", ".2%"), _text(row, "perplexity"))
        for model, row in (("base", base), ("delta", delta), ("LoRA", lora))
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


def _rival(rival: Rival | None) -> str:
    """Return one sentence about a LoRA of as many bytes."""
    if rival is None:
        return ""
    gain = "" if rival.kept is None else f", which goes {rival.kept:.2%} of that way"
    return (
        f"LoRA is one of no more bytes ({size_text(rival.size_bytes)}), by truncated SVD of the same "
        f"{rival.num_adapted} matrices: rank {rival.rank}, and {rival.rank + 1} in {rival.num_raised} of them{gain}."
    )


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


def _modules(tensors: Sequence[TensorFacts]) -> str:
    """Return the number of matrices on each axis and their errors, by module type."""
    groups = by_module(tensors)
    counts = {module: Counter(tensor.spec.axis for tensor in every) for module, every in groups.items()}
    axes = [axis for axis in AXES if any(counter[axis] for counter in counts.values())]
    rows = [
        (code(module), *(counts[module][axis] for axis in axes), _errors(tensor.spec for tensor in every))
        for module, every in groups.items()
    ]
    return table(("Module type", *axes, "Error"), rows) if rows else ""


def _errors(specs: Iterable[TensorSpec]) -> str:
    return _span((spec.error for spec in specs if spec.error is not None), ".4f")


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
        _errors(specs),
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
