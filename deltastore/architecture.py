"""The facts that transformers knows from a configuration: a model's ends, and the values that its code reads.

The fields that a model reads are found by watching: an empty copy of it is made and run on the meta device, with a
configuration that notes each field that code of transformers' models asks for. So defaults are filled in, and fields
that nothing reads, or that another field switches off, are left out. Functions import transformers when they are
called; a process that receives a base's facts needs none of it.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import nn

from deltastore.errors import CheckpointError, failures_as

# Of a configuration that lies, lists as long as its counts would be made.
MAX_MODULES = 2_000
# The longest context, in which a fine-tune may differ from its base.
POSITIONS = "max_position_embeddings"
# Names of one function in transformers, up to rounding.
ALIASES = {
    "swish": "silu", "gelu_python": "gelu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh", "gelu_python_tanh": "gelu_pytorch_tanh",
}  # fmt: skip
# Read by models, and without effect on the logits of a prompt; or with rules of their own, as vocabularies and ties.
WITHOUT_EFFECT = frozenset({
    "architectures", "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "label2id", "name_or_path", "num_labels",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "task_specific_params",
    "tie_word_embeddings", "tokenizer_class", "torch_dtype", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_cache", "use_flash_attn", "vocab_size",
})  # fmt: skip
_DROPOUT_OR_PRIVATE = re.compile(r".*(dropout|pdrop).*|_.*")
# Code that reads fields for other purposes than the model's arithmetic.
_NOT_THE_MODEL = re.compile(
    r"transformers\.(configuration_utils|modeling_utils|models\.auto|generation|utils|integrations)(\..*)?"
)
_READ_IN_SOURCE = re.compile(r"""config\.([a-z]\w*)|getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")
# Functions that compute frequencies.
_ROPE_FORMULA = "_compute_"
PROBE_TOKENS = 4
_FLOAT = "__float__"
_COUNTS = re.compile(r"(num|n)_.*(layers?|experts?)|n_layers?")


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding and output head of a causal language model, by the names that its class gives them."""

    embedding: str
    head: str
    tied: bool  # the configuration asks for one tensor

    def embedding_among(self, names: Iterable[str]) -> str:
        """Return the embedding's name in a checkpoint, which may lack the prefix of the class's names."""
        prefix = f"{self.embedding.split('.')[0]}."
        if any(name.startswith(prefix) for name in names):
            return self.embedding
        return self.embedding.removeprefix(prefix)


def ends_of(config: Mapping[str, Any]) -> Ends | None:
    """Return the ends that a `config.json` describes, with the configuration class's own default for the tie.

    None where transformers does not know the model type, or no causal language model of it that can tie its ends.

    Raises:
        CheckpointError: transformers knows the model type and refuses the configuration.
    """
    parsed = parse_config(config)
    found = None if parsed is None else _causal_model(parsed)
    if found is None:
        return None
    model_class, own = found
    for name, other in (getattr(model_class, "_tied_weights_keys", None) or {}).items():
        if name.endswith(".weight"):
            embedding, head = (name, other) if "embed_tokens" in name else (other, name)
            return Ends(embedding, head, bool(getattr(own, "tie_word_embeddings", False)))
    return None


def parse_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a `config.json`; None if it does not know the model type.

    Raises:
        CheckpointError: transformers knows the model type and refuses the configuration.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    with failures_as(refused):
        if config.get("model_type") not in CONFIG_MAPPING:
            return None
        _check_counts(config)
        own = json.loads(json.dumps(config), object_hook=_constant_or_object)
        return AutoConfig.for_model(**_without_dtypes(own))


def constant_object(name: str) -> dict[str, Any]:
    """Return the object that transformers writes for NaN or an infinity, which JSON lacks."""
    return {_FLOAT: name}


def _constant_or_object(values: dict[str, Any]) -> Any:
    """Return the number of a `constant_object`; any other object as it is."""
    if values.keys() == {_FLOAT} and values[_FLOAT] in ("NaN", "Infinity", "-Infinity"):
        return float(values[_FLOAT])
    return values


def as_json(parsed: Any) -> dict[str, Any]:
    """Return the values of a transformers configuration as its `config.json` has them, with the defaults."""
    own: dict[str, Any] = json.loads(
        json.dumps(parsed.to_dict(), default=str), parse_constant=constant_object
    )
    return own


def make_buildable(parsed: Any, attention: str | None = "eager") -> None:
    """Change the fields of a configuration on which no logit depends, and with which transformers may make no model.

    Args:
        attention: The implementation in place of the named one, whose package may be missing; None: the model's own.

    Raises:
        CheckpointError: it is that of several text models.
    """
    with failures_as(refused):
        text = parsed.get_text_config()
    rows = getattr(text, "vocab_size", None)
    for part in (parsed, text):
        pad = getattr(part, "pad_token_id", None)
        if isinstance(rows, int) and isinstance(pad, int) and not -rows <= pad < rows:
            part.pad_token_id = None
    parsed._attn_implementation = attention


def _without_dtypes(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the dtypes of a configuration and its parts: some are written in words that transformers refuses."""
    return {
        name: _without_dtypes(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in ("dtype", "torch_dtype")
    }


def refused(reason: str) -> CheckpointError:
    return CheckpointError(f"config.json: transformers refuses it: {reason}; fetch the file again")


def _causal_model(parsed: Any) -> tuple[Any, Any] | None:
    """Return the class of the causal language model, and the configuration that it takes, which may be a part."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    model_class = found[0] if isinstance(found, tuple) else found
    text = parsed.sub_configs.get("text_config")
    is_part = text is not None and getattr(model_class, "config_class", None) is text
    return model_class, parsed.get_text_config() if is_part else parsed


def _check_counts(config: Mapping[str, Any]) -> None:
    """Refuse more layers or experts than any model has, before modules are made of them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif _COUNTS.fullmatch(key) and isinstance(value, int) and value > MAX_MODULES:
            raise CheckpointError(
                f"config.json: {key} is {value}, more than {MAX_MODULES}: fetch the file again"
            )


@dataclass(frozen=True, slots=True)
class Reading:
    """The parts of a configuration that a model's code reads."""

    # Values of fields, as JSON has them; a part of the configuration is a dictionary, and so are rope parameters.
    facts: Mapping[str, Any]
    unread: Mapping[str, Any]  # those of the other fields that may have an effect elsewhere
    # By name, class and parameters' shapes of each module that has some of its own, but no row per token.
    modules: Mapping[str, str]
    max_positions: int | None  # tokens of the longest context


def read_by_model(config: Mapping[str, Any]) -> Reading | None:
    """Find the fields that the causal language model of a `config.json` reads; None if transformers has none of it.

    Takes tenths of a second, once for each configuration.

    Raises:
        CheckpointError: transformers knows the model type and refuses the configuration.
    """
    return _read_by_model(json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _read_by_model(document: str) -> Reading | None:
    parsed = parse_config(json.loads(document))
    found = None if parsed is None else _causal_model(parsed)
    if found is None:
        return None
    model_class, own = found
    full = as_json(parsed)
    make_buildable(parsed)
    reads, text = _Reads(), parsed.get_text_config()
    positions, rows = getattr(text, POSITIONS, None), getattr(text, "vocab_size", None)
    reads.watch(parsed, ())
    with failures_as(refused), torch.device("meta"), torch.no_grad():
        model = model_class(own).eval().to(torch.bfloat16)
    if not _runs(model):
        reads.add_source(model_class, parsed)
    facts, unread = _divided(full, (), reads.paths)
    if reads.rope_depends_on_length:
        facts[f"rope_{POSITIONS}"] = positions
    modules = {
        name: f"{type(module).__name__} {shapes}"
        for name, module in model.named_modules()
        if (shapes := [tuple(value.shape) for value in module.parameters(recurse=False)])
        and all(not shape or shape[0] != rows for shape in shapes)
    }
    return Reading(facts, unread, modules, positions if isinstance(positions, int) else None)


def _runs(model: nn.Module) -> bool:
    """Run a model on the meta device; False if its code looks at values, which are not there."""
    try:
        with failures_as(refused), torch.device("meta"), torch.no_grad():
            model(input_ids=torch.zeros((1, PROBE_TOKENS), dtype=torch.int64))
    except CheckpointError:
        return False
    return True


@dataclass(slots=True, eq=False)
class _Reads:
    """The fields that were asked for, as paths of names."""

    paths: set[tuple[str, ...]] = field(default_factory=set)
    rope_depends_on_length: bool = False

    def watch(self, config: Any, path: tuple[str, ...]) -> None:
        """Note what code of models asks a configuration and its parts for, from now on."""
        for name, value in list(vars(config).items()):
            if hasattr(value, "sub_configs"):
                self.watch(value, (*path, name))
            elif name == "rope_parameters" and isinstance(value, dict):
                vars(config)[name] = _watched(value, (*path, name), self.paths)
        reads = self
        stock: Any = type(config)
        renamed = getattr(stock, "attribute_map", {})

        def __getattribute__(own: Any, name: str) -> Any:
            frame = sys._getframe(1)
            if _is_of_a_model(frame):
                reads.paths.add((*path, renamed.get(name, name)))
                if name == POSITIONS and frame.f_code.co_name.startswith(_ROPE_FORMULA):
                    reads.rope_depends_on_length = True
            return stock.__getattribute__(own, name)

        # Under its own name, by which transformers finds the class of a part's model.
        body = {"__getattribute__": __getattribute__, "__module__": stock.__module__}
        config.__class__ = type(stock.__name__, (stock,), body)

    def add_source(self, model_class: Any, parsed: Any) -> None:
        """Add every field that the source of a model, or of the code that models share, asks some configuration for."""
        from transformers import cache_utils, masking_utils, modeling_rope_utils

        sources = [sys.modules[model_class.__module__], cache_utils, masking_utils, modeling_rope_utils]
        found = [each for module in sources for each in _READ_IN_SOURCE.findall(inspect.getsource(module))]
        names = {name for pair in found for name in pair if name}
        parts = [(), *((name,) for name, value in vars(parsed).items() if hasattr(value, "sub_configs"))]
        self.paths |= {(*part, name) for part in parts for name in names}


class _WatchedDict(dict[str, Any]):
    """Rope parameters that note which of them are asked for."""

    path: tuple[str, ...]
    reads: set[tuple[str, ...]]

    def __getitem__(self, key: str) -> Any:
        if _is_of_a_model(sys._getframe(1)):
            self.reads.add((*self.path, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if _is_of_a_model(sys._getframe(1)):
            self.reads.add((*self.path, key))
        return super().get(key, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> _WatchedDict:
        return _watched(copy.deepcopy(dict(self), memo), self.path, self.reads)


def _watched(value: dict[str, Any], path: tuple[str, ...], reads: set[tuple[str, ...]]) -> _WatchedDict:
    watched = _WatchedDict({
        key: _watched(part, (*path, key), reads) if isinstance(part, dict) else part for key, part in value.items()
    })  # fmt: skip
    watched.path, watched.reads = path, reads
    return watched


def _is_of_a_model(frame: FrameType) -> bool:
    reader = frame.f_globals.get("__name__", "")
    return reader.startswith("transformers.") and _NOT_THE_MODEL.fullmatch(reader) is None


def _divided(
    values: Mapping[str, Any], path: tuple[str, ...], reads: set[tuple[str, ...]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that were read, in their form, and the other ones by dotted name, but for those of no effect.

    Rope parameters that were asked for and are not there are None: code has defaults for them.
    """
    facts: dict[str, Any] = {}
    unread: dict[str, Any] = {}
    for name, value in values.items():
        own = (*path, name)
        is_former = name == "type" and "rope_type" in values
        if is_former or name in WITHOUT_EFFECT or name == POSITIONS or _DROPOUT_OR_PRIVATE.fullmatch(name):
            continue
        if isinstance(value, dict) and any(each[: len(own)] == own != each for each in reads):
            facts[name], more = _divided(value, own, reads)
            unread |= more
        elif own in reads or name == "model_type":
            facts[name] = value
        else:
            unread[".".join(own)] = value
    if "rope_parameters" in path:
        missing = {each[-1] for each in reads if each[:-1] == path} - values.keys() - {"type"}
        facts |= dict.fromkeys(sorted(missing))
    return facts, unread


def different_facts(facts: Mapping[str, Any], others: Mapping[str, Any], *, whole: bool = False) -> list[str]:
    """Return the dotted names of facts that differ between two models. A name that only one of them has is ignored.

    Args:
        whole: compare nested objects as they are, instead of the names that both have.
    """
    different = []
    for name in sorted((facts.keys() & others.keys()) - {POSITIONS}):
        one, other = facts[name], others[name]
        if isinstance(one, dict) and isinstance(other, dict) and not whole:
            different += [f"{name}.{each}" for each in different_facts(one, other)]
        elif _known(one) != _known(other):
            different.append(name)
    return different


def _known(value: Any) -> Any:
    return ALIASES.get(value, value) if isinstance(value, str) else value


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a configuration that a delta cannot change, as a manifest has them; and the longest context.

    Of a model type that transformers does not know, these are all of its fields, but for those without effect.

    Raises:
        CheckpointError: transformers knows the model type and refuses the configuration.
    """
    reading = read_by_model(config)
    if reading is not None:
        return {**reading.facts, **({POSITIONS: reading.max_positions} if reading.max_positions else {})}
    parsed = parse_config(config)
    values = json.loads(json.dumps(dict(config), default=str)) if parsed is None else as_json(parsed)
    return {
        name: value
        for name, value in values.items()
        if name not in WITHOUT_EFFECT and not _DROPOUT_OR_PRIVATE.fullmatch(name)
    }


def differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the fields in which the models of two configurations differ, and those that differ and nothing reads.

    Raises:
        CheckpointError: as `architecture`.
    """
    if config.get("model_type") != other.get("model_type"):
        return ["model_type"], []
    readings = [read_by_model(each) for each in (config, other)]
    if readings[0] is None or readings[1] is None:
        facts, others = architecture(config), architecture(other)
        return different_facts(facts, others, whole=True), []
    one, two = readings[0], readings[1]
    read = sorted({*different_facts(one.facts, two.facts), *_added(one, two), *_added(two, one)})
    if not read and one.modules != two.modules:
        different = one.modules.items() ^ two.modules.items()
        read = [f"the module {min(name for name, _ in different)}"]
    names = sorted(one.unread.keys() | two.unread.keys())
    return read, [name for name in names if one.unread.get(name) != two.unread.get(name)]


def _added(one: Reading, other: Reading) -> list[str]:
    """Return the fields that a model reads and that the other configuration lacks, but for what code takes instead."""
    return list(_added_facts(one.facts, other.facts, other.unread, ""))


def _added_facts(
    facts: Mapping[str, Any], others: Mapping[str, Any], unread: Mapping[str, Any], path: str
) -> Iterator[str]:
    for name, value in facts.items():
        if name.startswith("rope_"):
            # Its values are compared with those that are missing.
            continue
        if name not in others:
            if f"{path}{name}" not in unread and value not in _if_absent(name, facts):
                yield f"{path}{name}"
        elif isinstance(value, dict) and isinstance(others[name], dict):
            yield from _added_facts(value, others[name], unread, f"{path}{name}.")


def _if_absent(name: str, facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a field that mean as much as none: those that code takes where its class has no default."""
    if name == "is_causal":
        return (True,)
    if name == "head_dim":
        hidden, heads = facts.get("hidden_size"), facts.get("num_attention_heads")
        return (
            None,
            hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None,
        )
    return (None, False)
