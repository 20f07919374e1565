"""Text models inside models that also read images or sound (wrappers): their configuration and the names of tensors.

A wrapper's checkpoint is used as that of its text model. All readers see the names and the configuration that the text
model has alone; towers for images and sound are never made. Functions import transformers when they are called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from deltastore.architecture import WITHOUT_EFFECT, as_json, parse_config, refused
from deltastore.errors import NotServable, failures_as

# Model types that compute from text alone what their text model computes; a test compares them. Others may not: some
# let all tokens of a prompt attend to each other.
WRAPPERS = frozenset({"gemma3", "gemma4", "mistral3"})
_TEXT = "text_config"
# Fields of the whole model that its text model has, too.
_SHARED = ("_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype")


def text_config(parsed: Any) -> Any:
    """Return transformers' configuration of a wrapper's text model, with the wrapper's ties; any other one as it is."""
    if parsed.model_type not in WRAPPERS:
        return parsed
    text = parsed.get_text_config()
    text.tie_word_embeddings = parsed.tie_word_embeddings
    if text.dtype is None:
        text.dtype = parsed.dtype
    return text


@dataclass(frozen=True, slots=True, eq=False)
class TextForm:
    """The text model of a wrapper's configuration."""

    config: Mapping[str, Any]  # as `config.json` of the text model alone
    _model: Any  # the wrapper, on the meta device
    _parts: Mapping[str, str]  # from the paths of body and head in the wrapper to those in the text model
    _towers: tuple[str, ...]  # prefixes of parameters

    def names(self, stored: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
        """Return the name in the text model of each stored tensor, or in the wrapper, and whether it is a tower's.

        A tensor of neither keeps its name. Experts that transformers stacks stay apart.
        """
        # Deferred, because it takes seconds.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        transforms = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        known, prefix = self._model.state_dict(), self._model.base_model_prefix
        found = {}
        for name in stored:
            target, _ = rename_source_key(name, renamings, [], prefix, known)
            own = self.in_text(target)
            is_tower = own is None and (target in known or target.startswith(self._towers))
            found[name] = (own or (target if is_tower else name), is_tower)
        return found

    def in_text(self, parameter: str) -> str | None:
        """Return the name in the text model of a parameter of the wrapper; None for one of a tower."""
        for path, own in self._parts.items():
            if parameter.startswith(f"{path}."):
                return own + parameter.removeprefix(path)
        return None

    def parameter(self, name: str) -> str:
        """Return the wrapper's parameter of a name in the text model, by which transformers reads it, too."""
        for path, own in self._parts.items():
            if name.startswith(f"{own}."):
                return path + name.removeprefix(own)
        return name


def text_form(config: Mapping[str, Any]) -> TextForm | None:
    """Return the text model of a `config.json`; None if it describes no wrapper, or one of another kind.

    Takes tenths of a second, once for each configuration.

    Raises:
        CheckpointError: transformers refuses the configuration.
    """
    if not _is_wrapper(config):
        return None
    return _text_form(json.dumps(config, sort_keys=True, default=str))


def _is_wrapper(config: Mapping[str, Any]) -> bool:
    # It may be of any type, in a damaged file.
    return any(config.get("model_type") == known for known in WRAPPERS)


def own_document(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `config.json` of a wrapper's text model; any other one as it is.

    Raises:
        CheckpointError: as `text_form`.
    """
    form = text_form(config)
    return config if form is None else form.config


@lru_cache(maxsize=4)
def _text_form(document: str) -> TextForm | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = json.loads(document)
    parsed = parse_config(config)
    if parsed is None:
        return None
    text = text_config(parsed)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    own = as_json(text)
    own |= {name: config[name] for name in _SHARED if config.get(name) is not None}
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    wrapper_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(parsed)]
    with failures_as(refused), torch.device("meta"):
        model, alone = wrapper_class(parsed), text_class(text)
    inner = next(module for module in model.modules() if type(module) is type(alone.base_model))
    parts = {
        _path(model, inner): _path(alone, alone.base_model),
        _path(model, model.get_output_embeddings()): _path(alone, alone.get_output_embeddings()),
    }
    above = {"", *(".".join(path.split(".")[:end]) for path in parts for end in range(path.count(".") + 1))}
    towers = tuple(
        f"{path}."
        for path, _ in model.named_modules()
        if path not in {*above, *parts} and path.rpartition(".")[0] in above
    )
    return TextForm({**own, "architectures": [text_class.__name__]}, model, parts, towers)


def _path(model: Any, module: Any) -> str:
    return next(str(path) for path, found in model.named_modules() if found is module)


def check_text_alone(config: Mapping[str, Any]) -> None:
    """Refuse the `config.json` of a wrapper, for vLLM, which runs it with its towers.

    Raises:
        NotServable: it is one.
    """
    if _is_wrapper(config):
        raise NotServable(
            f"model type {config['model_type']!r}: vLLM runs it with its towers for images or sound, "
            "beside which deltas are not applied yet: serve it with --backend native"
        )


def tower_differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the fields, by dotted name, in which two wrappers differ beside their text models.

    Raises:
        CheckpointError: transformers refuses a configuration.
    """
    one, two = (_flat(parse_config(each).to_dict()) for each in (config, other))
    return sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in WITHOUT_EFFECT or name == _TEXT or name.startswith("_"):
            continue
        flat |= _flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return flat
