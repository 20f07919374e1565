"""Bring the names of a fine-tune's tensors to the base's, and name what is no part of the model as what it is.

A tensor that only one of the two has does not matter if transformers' model does not read it. Reads headers only.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deltastore.architecture import make_buildable, parse_config
from deltastore.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, StoredTensor
from deltastore.errors import ArtifactError, CheckpointError, failures_as, shown
from deltastore.format.header import parse_json

# For types alone, because it imports transformers, which takes seconds.
if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

MAX_PREFIX_PARTS = 4  # names of modules before the part that both names share
MAX_LISTED = 3
FETCH_BOTH = "fetch the checkpoint again, or the config.json that belongs to it"
TUNED_FROM = "give the base that it was tuned from"


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors beside a model's own, by a pattern of their names."""

    pattern: str
    what: str
    # None for tensors beside a whole model, which are left out.
    way_out: str | None = None


KINDS = (
    Kind(
        r"(^|\.)(lora_|ia3_l|hada_w|lokr_w|oft_|vera_|base_layer\.|modules_to_save\.|original_module\.)",
        "an adapter that was not merged",
        "call merge_and_unload() of peft and save the model again, or give the adapter's own directory",
    ),
    Kind(
        r"\.(qweight|qzeros|g_idx|scales|(nested_)?absmax|(nested_)?quant_map|SCB|weight_format|weight_packed|"
        r"weight_shape|weight_zero_point|weight_scale(_inv)?|input_scale)$|\.quant_state\.",
        "quantised weights",
        "save the model in bfloat16, float16 or float32",
    ),
    Kind(
        r"(^|\.)_?flat_param",
        "flat parameters of FSDP",
        "gather the full state dict and save the model again",
    ),
    Kind(
        r"^(score|classifier|qa_outputs|reward_head|regression_head)\.",
        "the head of a classifier or reward model",
        "give a language model, with an output head over its vocabulary",
    ),
    Kind(r"(^|\.)(v_head|value_head)\.", "a value head"),
    Kind(r"(^|\.)((q|k|v|kv)(_proj\.(output_)?|_)scale)$", "scales of a quantised KV cache"),
    Kind(r"(^|\.)(mtp|nextn)[._]", "layers that predict further tokens (MTP)"),
    Kind(r"rotary_emb\.|(cos|sin)_cached$|inv_freq$|position_ids$|masked_bias$", "tables that are computed"),
    Kind(
        r"(^|\.)(visual|vision\w*|image_\w+|multi_modal_projector|audio\w*|embed_vision|embed_audio)\.",
        "a tower for images or sound",
    ),
)
MORE_LAYERS = Kind("", "layers behind its last one, such as those that predict further tokens (MTP)")
OTHERS = Kind("", "tensors that are no part of the model")


def with_base_names(base: Checkpoint, finetune: Checkpoint) -> Checkpoint:
    """Return the fine-tune with one prefix added or taken off where the base has the rest of the name.

    transformers does the same for the prefix of a model's own body, such as ``model.``.
    """
    foreign = finetune.tensors.keys() - base.tensors.keys()
    wanted = base.tensors.keys() - finetune.tensors.keys()
    counts: Counter[tuple[str, str]] = Counter()
    for name in foreign:
        counts.update((prefix, "") for prefix, rest in _splits(name) if rest in wanted)
    for name in wanted:
        counts.update(("", prefix) for prefix, rest in _splits(name) if rest in foreign)
    if not counts:
        return finetune
    (taken, added), count = counts.most_common(1)[0]
    # A few equal endings are chance.
    if 2 * count < len(finetune.tensors):
        return finetune
    renamed = {}
    for name, stored in finetune.tensors.items():
        own = added + name.removeprefix(taken)
        if name in foreign and name.startswith(taken) and own in wanted:
            name = own
        renamed[name] = replace(stored, name=name)
    return replace(finetune, tensors=renamed)


def stored_targets(model: Any, names: Collection[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each stored name that a model of transformers reads, and the parameter or buffer that it goes to.

    The third part is the pattern of the `WeightConverter` that converts the tensor, or None. In natural order, because
    experts are stacked by number.
    """
    # Deferred, because it takes seconds and most pairs need none of it.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = converters_of(model)
    known, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target in known:
            yield name, target, pattern


def converters_of(model: Any) -> list[WeightConverter]:
    """Return the rules by which transformers makes a model's parameters from several stored tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)]


def model_without_weights(config: Mapping[str, Any]) -> Any:
    """Return the causal language model of a configuration on the meta device; None if transformers builds none."""
    # Deferred, because it takes seconds.
    from transformers import AutoModelForCausalLM

    try:
        with failures_as(CheckpointError), torch.device("meta"):
            parsed = parse_config(config)
            make_buildable(parsed)
            return AutoModelForCausalLM.from_config(parsed, trust_remote_code=False)
    except CheckpointError:
        return None


def unread_names(config: Mapping[str, Any], names: Collection[str]) -> frozenset[str]:
    """Return the names that the model of a configuration does not read; none if transformers builds no such model."""
    model = model_without_weights(config)
    if model is None:
        return frozenset()
    with failures_as(CheckpointError):
        return frozenset(names) - {name for name, _, _ in stored_targets(model, names)}


def check_whole(base: Checkpoint) -> None:
    """Refuse a base of which transformers would load a part: a tensor is missing, or has another shape than its model.

    Nothing is known where transformers builds no model of the configuration.

    Raises:
        CheckpointError: the first such tensor.
    """
    model = model_without_weights(base.config)
    if model is None:
        return
    known = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # Most names are the model's own; finding the others takes time for each.
    targets = {name: name for name in base.tensors if name in known}
    converted = set()
    for name, target, pattern in stored_targets(model, base.tensors.keys() - targets.keys()):
        if pattern is None:
            targets[name] = target
        else:
            converted.add(target)
    for name, target in targets.items():
        if (shape := base.tensors[name].shape) == known[target]:
            continue
        if 0 in shape:
            raise empty_tensor(base.tensors[name])
        raise CheckpointError(
            f"{base.tensors[name].file}: tensor {shown(name)} has shape {shape}, and the model that its config.json "
            f"describes has {known[target]} there: {FETCH_BOTH}"
        )
    found, tied = {*targets.values(), *converted}, model.all_tied_weights_keys
    ignored = model._keys_to_ignore_on_load_missing or ()
    # Buffers that are missing have values of their own; parameters would be random.
    for name, _ in model.named_parameters(remove_duplicate=False):
        shared = {name, tied.get(name, name), *(key for key, other in tied.items() if other == name)}
        if not shared & found and not any(re.search(pattern, name) for pattern in ignored):
            raise CheckpointError(
                f"{base.path}: its config.json describes a model with {shown(name)}, which is in none of its shards: "
                f"{FETCH_BOTH}"
            )


def empty_tensor(stored: StoredTensor) -> CheckpointError:
    """Return the error of a tensor without values."""
    return CheckpointError(
        f"{stored.file}: tensor {stored.name!r} is empty, as DeepSpeed's ZeRO-3 leaves parameters that it "
        "did not gather: run its zero_to_fp32.py, or save with stage3_gather_16bit_weights_on_model_save"
    )


def check_names(
    base: Checkpoint, finetune: Checkpoint, missing: Collection[str], unknown: Collection[str]
) -> None:
    """Warn of tensors that only one of the two has and that their model does not read, by what they are.

    Args:
        missing: names that only the base has.
        unknown: names that only the fine-tune has.

    Raises:
        CheckpointError: the model reads one of them, or the fine-tune is not a whole model of its own.
    """
    kinds = {name: _kind_of(name, base.config) for name in {*missing, *unknown}}
    for kind in KINDS:
        found = sorted(name for name in unknown if kinds[name] is kind)
        if found and kind.way_out is not None:
            raise CheckpointError(f"{finetune.path}: it holds {kind.what} ({listed(found)}): {kind.way_out}")
    unread = unread_names(base.config, kinds)
    lost, strange = sorted({*missing} - unread), sorted({*unknown} - unread)
    if lost or strange:
        raise CheckpointError(
            f"{finetune.path}: its tensors are not the base's (missing: {listed(lost)}; "
            f"unknown: {listed(sorted(unknown))}){_cause(base, finetune, lost, strange, kinds)}"
        )
    for names, says in (
        (unknown, "left out of the delta, because its model does not read them"),
        (missing, "not there, and the base's stay, which its model does not read"),
    ):
        for kind in dict.fromkeys(kinds[name] for name in sorted(names)):
            own = sorted(name for name in names if kinds[name] is kind)
            warn(f"{finetune.path}: {kind.what} ({listed(own)}): {says}")


def warn_of_stale_index(checkpoint: Checkpoint) -> None:
    """Warn of a directory with two models, of which transformers reads the single file."""
    index = checkpoint.path / INDEX_FILE
    if not ((checkpoint.path / SINGLE_FILE).exists() and index.exists()):
        return
    shards = sorted(path.name for path in checkpoint.path.glob("model-*-of-*.safetensors"))
    if shards:
        warn(
            f"{checkpoint.path}: {SINGLE_FILE} is read, as transformers does, and {shards[0]} beside it is not: "
            "one of the two is left from another save, remove it"
        )


CARD, MAX_CARD_BYTES = "README.md", 1 << 20


def tuned_from(directory: Path) -> list[str]:
    """Return the models that a directory's card, adapter or configuration says it was tuned from."""
    found = list(_named_in_card(directory / CARD))
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("config.json", "_name_or_path")):
        try:
            document = parse_json((directory / file).read_bytes(), file)
        except (OSError, ArtifactError):
            # Readers that need the file report it.
            continue
        if isinstance(document, dict) and isinstance(name := document.get(key), str) and name:
            found.append(name)
    return found


def _named_in_card(card: Path) -> Iterator[str]:
    """Yield what `base_model` names in the front matter of a model card."""
    # Deferred, because most commands need it not.
    import yaml

    try:
        with card.open(encoding="utf-8") as file:
            text = file.read(MAX_CARD_BYTES)
        front = re.match(r"\ufeff?---\s*\n(.*?)\n---", text, re.DOTALL)
        with failures_as(CheckpointError):
            document = yaml.safe_load(front[1]) if front else None
    except (OSError, ValueError, CheckpointError):
        # A card is for people, and may be anything.
        return
    named = document.get("base_model") if isinstance(document, dict) else None
    yield from (
        name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str) and name
    )


def listed(names: list[str]) -> str:
    """Return the first names of a list, and whether there are more."""
    return ", ".join([*names[:MAX_LISTED], *(["..."] if len(names) > MAX_LISTED else [])]) or "none"


@cache
def warn(message: str) -> None:
    """Warn once, because a command may look at two checkpoints twice."""
    print(f"warning: {message}", file=sys.stderr)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield a name's leading modules and the rest, for each number of them up to `MAX_PREFIX_PARTS`."""
    end = -1
    for _ in range(MAX_PREFIX_PARTS):
        if (end := name.find(".", end + 1)) < 0:
            return
        yield name[: end + 1], name[end + 1 :]


def _kind_of(name: str, config: Mapping[str, Any]) -> Kind:
    for kind in KINDS:
        if re.search(kind.pattern, name):
            return kind
    num_layers = config.get("num_hidden_layers")
    layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
    if layer is not None and isinstance(num_layers, int) and int(layer[2]) >= num_layers:
        return MORE_LAYERS
    return OTHERS


def _cause(
    base: Checkpoint,
    finetune: Checkpoint,
    lost: list[str],
    strange: list[str],
    kinds: Mapping[str, Kind],
) -> str:
    """Return what makes names differ, as far as it can be told, and the way out."""
    for checkpoint in (finetune, base):
        if all((checkpoint.path / file).exists() for file in (SINGLE_FILE, INDEX_FILE)):
            return (
                f": {checkpoint.path} holds {SINGLE_FILE}, which is read, and {INDEX_FILE}: one of the two is left "
                "from another save, remove it"
            )
    named = [kinds[name] for name in (*strange, *lost) if kinds[name] is not OTHERS]
    if named:
        return f", among them {named[0].what}: {TUNED_FROM}"
    if lost and not finetune.tensors.keys() - base.tensors.keys():
        return (
            f": {len(lost)} of the base's {len(base.tensors)} tensors are not there, as if one of several processes "
            "had saved its part: save the whole model again"
        )
    return f": {TUNED_FROM}"
