"""Each tensor of each family, changed alone, is served as it is merged, or its upload is refused by name.

`python -m tests.server.model.test_families` writes docs/models.md, which says so of every causal type of transformers.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, CheckpointError, NotServable
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.header import read_into
from deltastore.servable import servable_model
from deltastore.wrappers import text_form
from server.deltas.resident import ResidentDelta, arena
from server.model.attention import AttentionMetadata, Chunk
from server.model.loader import ServedModel, load_model
from server.publishing.checks import check_tensors
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    MERGED_ONLY,
    MORE_SERVED,
    SERVED_TOO,
    WRAPPERS,
    Change,
    load_whole,
    make_base,
    make_pair,
    shrunk,
)
from tests.server.helpers.served import make_delta, merged

PROVEN = (*ARCHITECTURES, *MORE_SERVED, *SERVED_TOO, *WRAPPERS)
CPU = torch.device("cpu")
SLOT_BYTES = 1 << 20
PROMPT = torch.tensor([5, 200, 17, 99, 3, 120, 64, 250, 31, 77, 180, 9])
# Longer than the windows of families that have some; the second one reads keys of the first from the cache.
STEPS = (slice(0, 9), slice(9, 12))
# Stored beside the weights, and read by layers where no delta acts.
BUFFERS = {
    "gemma4": {"layer_scalar"},
    "gemma4_text": {"layer_scalar"},
    "gemma4_unified_text": {"layer_scalar"},
    "apertus": {"beta", "eps"},
}


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """One tensor of a delta as an artifact of its own."""

    name: str
    file: Path

    @classmethod
    def of(cls, artifact: Artifact, directory: Path) -> Iterator[Alone]:
        for number, (name, spec) in enumerate(artifact.manifest.tensors.items()):
            file = directory / f"alone-{number}.safetensors"
            with ArtifactWriter(file) as writer:
                if spec.codec == "onebit":
                    writer.add_onebit(name, artifact.onebit(name))
                else:
                    writer.add_whole(name, artifact.whole(name))
                changes = {"tensors": {name: spec}, "files": [], "device_bytes": writer.device_bytes}
                writer.finish(artifact.manifest.model_copy(update=changes))
            yield cls(name, file)


def load(base: Path) -> ServedModel:
    return load_model(Checkpoint.open(base), CPU, torch.float32, threading.Event())


def resident(served: ServedModel, files: Sequence[Path]) -> list[ResidentDelta]:
    """Put artifacts into slots of their own."""
    served.context.allocate(len(files), (1 + len(files)) * len(PROMPT), CPU)
    found, tables = [], served.context.tables
    for slot, file in zip(arena(len(files), SLOT_BYTES, CPU), files, strict=True):
        with Artifact.open(file) as artifact:
            layout = tables.layout(artifact.header, artifact.manifest, "0" * 64)
            memory = slot.memory[: artifact.manifest.device_bytes]
            read_into(artifact.fd, memory.numpy().data, artifact.header.data_start, str(file))
        found.append(tables.adopt(layout, slot))
    return found


@torch.inference_mode()
def served_logits(served: ServedModel, deltas: Sequence[ResidentDelta | None]) -> Tensor:
    """Return the logits [deltas, tokens, vocab] of the prompt, all of whose sequences run together."""
    served.attention.allocate(len(deltas))
    parts = []
    for own in STEPS:
        counts = [own.stop - own.start] * len(deltas)
        chunks = [Chunk(own.start, counts[0], [page]) for page in range(len(deltas))]
        metadata = AttentionMetadata.of(chunks, served.attention.page_tokens, CPU)
        ids, positions = (part[own].repeat(len(deltas))[None] for part in (PROMPT, torch.arange(len(PROMPT))))
        with served.context.step(deltas, counts, counts), served.attention.step(metadata):
            logits = served.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        parts.append(logits.view(len(deltas), counts[0], -1))
    return torch.cat(parts, 1)


@torch.inference_mode()
def merged_logits(model: PreTrainedModel, name: str, values: Mapping[str, Tensor]) -> Tensor:
    """Return the logits [tokens, vocab] of a base whose tensor `name` has other values."""
    # Some checkpoints name the head otherwise than the model does.
    name = name if name in values else "lm_head.weight"
    own = model.state_dict()[name]
    before = own.clone()
    own.copy_(values[name])
    logits: Tensor = model(input_ids=PROMPT[None], use_cache=False).logits[0]
    own.copy_(before)
    return logits


@pytest.mark.parametrize("architecture", PROVEN)
def test_each_tensor_changed_alone_is_served_as_merged_or_refused(architecture: str, tmp_path: Path) -> None:
    models = make_pair(architecture, tmp_path, seed=2, changes=(Change(buffers=True),))
    delta = make_delta(models.base, models.finetunes[0], tmp_path / "delta.safetensors", method="both")
    values = merged(models.base, delta, tmp_path / "merged").state_dict()
    plain, served = load_whole(models.base), load(models.base)
    form = text_form(Checkpoint.open(models.base).stored_config)
    unread = served.context.tables.unread(served.base)
    assert {name.rpartition(".")[2] for name in unread} == BUFFERS.get(architecture, set())
    with Artifact.open(delta) as artifact:
        every = list(Alone.of(artifact, tmp_path))
    assert {one.name for one in every} == served.base.shapes.keys()
    for one in every:
        if one.name in unread:
            with pytest.raises(ArtifactError, match=f"changes '{re.escape(one.name)}', which layers"):
                check_tensors(one.file, served.base, SLOT_BYTES, unread)
            # It may be in a registry that other servers publish to.
            with pytest.raises(ArtifactError, match=f"changes '{re.escape(one.name)}', which layers"):
                resident(served, [one.file])
        else:
            check_tensors(one.file, served.base, SLOT_BYTES, unread)
    read = [one for one in every if one.name not in unread]
    got = served_logits(served, [None, *resident(served, [one.file for one in read])])
    for one, logits in zip(read, got[1:], strict=True):
        want = merged_logits(plain, one.name if form is None else form.parameter(one.name), values)
        assert (want - got[0]).abs().max() > 1e-3, f"{one.name} changes nothing"
        assert torch.allclose(logits, want, rtol=1e-4, atol=2e-4), one.name


@pytest.mark.parametrize("architecture", MERGED_ONLY)
def test_families_with_other_layers_are_refused_by_the_layers_names(
    architecture: str, tmp_path: Path
) -> None:
    base = make_pair(architecture, tmp_path, changes=()).base
    with pytest.raises(NotServable, match=r"model\.layers\.0\..*such models can be compressed and merged"):
        load(base)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma3n", r"it wraps a text model \(gemma3n_text\) .* save the text model"),
        ("gemma4_unified_assistant", "it drafts tokens from the hidden states of another model"),
        ("musicgen", "it is made of several text models"),
    ],
)
def test_a_model_that_is_not_one_text_model_is_refused_as_what_it_is(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(NotServable, match=f"'{model_type}': {reason}"):
        servable_model(tmp_path)


@pytest.mark.parametrize("architecture", MERGED_ONLY)
def test_each_tensor_of_families_that_are_not_served_is_merged(architecture: str, tmp_path: Path) -> None:
    models = make_pair(architecture, tmp_path, seed=2, changes=(Change(buffers=True),))
    base, finetune = Checkpoint.open(models.base), Checkpoint.open(models.finetunes[0])
    delta = make_delta(models.base, finetune.path, tmp_path / "delta.safetensors", method="both")
    made = merged(models.base, delta, tmp_path / "merged")
    written = Checkpoint.open(tmp_path / "merged")
    with Artifact.open(delta) as artifact:
        specs = artifact.manifest.tensors
        assert specs.keys() == base.tensors.keys() == written.tensors.keys()
        for name, spec in specs.items():
            before, want, got = (side.read(name).float() for side in (base, finetune, written))
            if spec.codec == "whole":
                assert torch.equal(got, want), name
            else:
                assert (got - want).norm() < (before - want).norm(), name
    logits = [
        model(input_ids=PROMPT[None], use_cache=False).logits
        for model in (made, AutoModelForCausalLM.from_pretrained(models.base, dtype=torch.float32).eval())
    ]
    assert not torch.equal(*logits)


PAGE = Path(__file__).parents[3] / "docs" / "models.md"
INTRODUCTION = f"""# Model types

Which bases are served, of the causal language models of transformers {transformers.__version__}. A test writes this
page (`python -m tests.server.model.test_families`) and compares it. Models are small and random, in float32 on the
CPU. A base with a layer of unknown kind is refused at start, and an upload that changes a tensor which no layer reads
from a delta is refused, both by name. For `--backend vllm` see [vllm.md](vllm.md#model-types).

A type is tried with the layers of its default configuration. A checkpoint with other ones, such as experts or
convolutions that its `config.json` switches on, is checked again when the server starts.
"""
SECTIONS = {
    "proven": f"""
## Served and proven

Each tensor of a checkpoint was changed alone. The logits of all these variants, in one batch over a paged cache, equal
those of the merged checkpoints. Buffers with a name here may not differ from the base's.
{", ".join(f"`{name}`" for name in sorted(WRAPPERS))} also read images or sound. Their text models are served, and
compared with transformers' own loading of the whole; their towers are not read.
""",
    "served": """
## Served

The check at start passes: one random delta of all matrices, norms and activations gives what the plain model gives.
""",
    "merged": """
## Compressed and merged only

Every tensor of the merged checkpoint was compared with the fine-tune's. `peraxis serve` refuses the base.
""",
    "refused": """
## Not served

Compressing and merging these types is not tested.
""",
}
MAX_NUMEL = 50_000_000
# Errors of transformers for sizes that do not fit each other.
UNFIT = (
    RuntimeError, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError,
    AssertionError, StrictDataclassError, CheckpointError,
)  # fmt: skip


def page(directory: Path) -> str:
    """Return the text of docs/models.md. Small models are written to a directory."""
    others = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {*PROVEN, *MERGED_ONLY})
    defects = {name: defect(name, directory / name) for name in others}
    proven = {
        name: ", ".join(f"`{buffer}`" for buffer in sorted(BUFFERS.get(name, ()))) for name in sorted(PROVEN)
    }
    merged_only = {
        name: defect_of(make_pair(name, directory / name, changes=()).base) or ""
        for name in sorted(MERGED_ONLY)
    }
    rows = {
        "proven": _table("buffers of the base", proven),
        "served": ", ".join(f"`{name}`" for name, why in defects.items() if why is None),
        "merged": _table("why it is not served", merged_only),
        "refused": _table("why", {name: why for name, why in defects.items() if why is not None}),
    }
    return "\n".join([INTRODUCTION, *(f"{SECTIONS[key].lstrip()}\n{text}\n" for key, text in rows.items())])


def defect(model_type: str, directory: Path) -> str | None:
    """Return why a model type is not served; None if it is."""
    directory.mkdir()
    for configuration in (CONFIG_MAPPING[model_type], lambda: shrunk(model_type)):
        try:
            configuration().save_pretrained(directory)
            model = servable_model(directory)
        except NotServable as error:
            return _reason(error)
        except UNFIT:
            continue
        if sum(value.numel() for value in model.parameters()) <= MAX_NUMEL:
            make_base(model.config, directory)
            return defect_of(directory)
    return "not tried: transformers makes no small model of this type from its default configuration"


def defect_of(base: Path) -> str | None:
    """Return why a base is not served; None if it is."""
    try:
        load(base)
    except NotServable as error:
        return _reason(error)
    return None


def _reason(error: NotServable) -> str:
    """Return the part of a message that holds for every model of a type."""
    if classes := re.findall(r"\((\w+)\)", str(error).partition("activation: ")[2]):
        return f"layers of unknown kind: {', '.join(classes)}"
    if wrapped := re.search(r"it wraps a text model \((\w+)\)", str(error)):
        return f"a wrapper of `{wrapped[1]}`: its text model has to be saved alone"
    if "cannot be run in" in str(error):
        return "it cannot be run in float64, in which deltas are checked"
    if "computes something else" in str(error):
        return "it computes something else when it is delta-aware"
    return str(error).partition(": ")[2].partition(": such models")[0]


def _table(head: str, rows: Mapping[str, str]) -> str:
    return "\n".join(
        [f"| `model_type` | {head} |", "|---|---|", *(f"| `{a}` | {b} |" for a, b in rows.items())]
    )


def test_the_page_says_what_becomes_of_every_type(tmp_path: Path) -> None:
    assert page(tmp_path) == PAGE.read_text(), "run python -m tests.server.model.test_families"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(page(Path(scratch)))
