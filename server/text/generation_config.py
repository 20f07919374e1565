"""Reads generation configs: the end tokens, the rules and the sampling parameters that a variant has by default.

Each field that transformers' `generate()` obeys is obeyed, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from deltastore.errors import ArtifactError, CheckpointError
from deltastore.format.files import GENERATION_FILE
from deltastore.format.header import parse_json
from server.errors import InvalidRequest
from server.protocol.request import SamplingParams
from server.protocol.rules import BiasTable, GenerationRules, ban_table, id_list
from server.text.failures import failures_as

# A model has a few end tokens.
MAX_EOS_TOKENS = 1024
# Token ids of all rules together. They go to the engine with each request.
MAX_RULE_IDS = 4096
# An engine keeps a sequence's n-grams: hundreds of bytes for each of its tokens.
MAX_NGRAM = 32
MAX_BIAS = 1e9
MAX_DECAY = 100.0
# As of a request.
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
MAX_INT = 1 << 31

# Sampling parameters that a generation config may set, and their types.
DEFAULTED: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
}
# What `generate()` takes for a config that samples and has none.
DEFAULT_TOP_K = 50
# Fields of which this server obeys no other value than none, False and these. `generate()` obeys them with several
# passes through the model, another model, the text of the prompt or a clock; the rest makes no other tokens.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "penalty_alpha": (0,),
    "guidance_scale": (1,), "constraints": (), "force_words_ids": (), "dola_layers": (), "watermarking_config": (),
    "prompt_lookup_num_tokens": (), "assistant_early_exit": (), "assistant_ensemble_weight": (), "use_mtp": (),
    "speculation_type": (), "is_assistant": (), "token_healing": (), "max_time": (), "remove_invalid_values": (),
}  # fmt: skip
# A cache of rounded keys and values gives other tokens.
REFUSED_CACHE = "quantized"
# Fields of which each token id must be one of the variant's, as in transformers.
KNOWN_IDS = ("sequence_bias", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")
ID_LISTS = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
LISTS_OF_IDS = ("sequence_bias", "bad_words_ids")
# Estimated size of an end token in a set.
EOS_BYTES = 64


@dataclass(frozen=True, slots=True)
class Generation:
    """The values of a generation config that requests use."""

    eos_token_ids: frozenset[int]
    defaults: Mapping[str, Any]  # fields of `SamplingParams`
    max_length: int | None = (
        None  # tokens of prompt and output together, if `defaults` sets no `max_new_tokens`
    )

    @classmethod
    def of(cls, config: Mapping[str, Any], num_embeddings: int) -> Generation:
        """Return the values of a checked config.

        Args:
            num_embeddings: token ids are below it.

        Raises:
            ValueError: a rule needs a token id that there is not.
        """
        made = cls(eos_token_ids(config), sampling_defaults(config), config.get("max_length"))
        for name in KNOWN_IDS:
            most = max(_ids_of(config, name), default=-1)
            if most >= num_embeddings:
                raise ValueError(f"{name} holds the token id {most}, not below {num_embeddings}")
        return made

    @property
    def num_bytes(self) -> int:
        """About the size of its token ids in bytes."""
        rules: GenerationRules | None = self.defaults.get("rules")
        return EOS_BYTES * len(self.eos_token_ids) + (rules.num_bytes if rules else 0)


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `SamplingParams` fields that a generation config sets.

    A config without `do_sample` is greedy, as in transformers' `generate()`.
    """
    given = {name: kind for name, kind in DEFAULTED.items() if config.get(name) is not None}
    defaults: dict[str, Any] = {name: kind(config[name]) for name, kind in given.items()}
    if config.get("do_sample"):
        defaults.setdefault("top_k", DEFAULT_TOP_K)
    else:
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    rules, stop = generation_rules(config), config.get("stop_strings")
    if not rules.is_neutral:
        defaults["rules"] = rules
    if stop:
        defaults["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return defaults


def generation_rules(config: Mapping[str, Any]) -> GenerationRules:
    """Return the rules of a checked generation config."""
    rules: dict[str, Any] = {
        "sequence_bias": BiasTable.of(config.get("sequence_bias") or ()),
        "bad_words_ids": ban_table(config.get("bad_words_ids") or ()),
        **{name: id_list(_ids_of(config, name)) for name in ID_LISTS},
    }
    names = ["min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"]
    names += ["forced_bos_token_id", "encoder_repetition_penalty"]
    if config.get("do_sample"):
        names += ["top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"]
    rules |= {name: config[name] for name in names if config.get(name) is not None}
    if (decay := config.get("exponential_decay_length_penalty")) is not None:
        rules["exponential_decay_length_penalty"] = (decay[0], float(decay[1]))
    return GenerationRules(**rules)


def _ids_of(config: Mapping[str, Any], name: str) -> Iterable[int]:
    """Return the token ids that a field of a checked generation config holds."""
    value = config.get(name)
    if isinstance(value, int):
        return (value,)
    if name in LISTS_OF_IDS:
        return chain.from_iterable(each if name == "bad_words_ids" else each[0] for each in value or ())
    return value or ()


def eos_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens of a generation config."""
    eos = config.get("eos_token_id")
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def base_generation(base_dir: Path, num_embeddings: int) -> Generation:
    """Return what requests use of a base's generation config.

    Raises:
        ArtifactError: a value of it cannot be used.
        CheckpointError: the base has none, and its model config is no JSON object.
    """
    config = base_generation_config(base_dir)
    with _refusing(str(base_dir / GENERATION_FILE)):
        return Generation.of(config, num_embeddings)


def base_generation_config(base_dir: Path) -> Mapping[str, Any]:
    """Read a checkpoint's generation config; without one, take the special tokens of its model config.

    Raises:
        ArtifactError: a value of the generation config cannot be used.
        CheckpointError: the model config is no JSON object.
    """
    path = base_dir / GENERATION_FILE
    if path.exists():
        return parse_generation_config(path.read_bytes(), str(path))
    path = base_dir / "config.json"
    config = parse_json(path.read_bytes(), str(path))
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: it holds no JSON object: fetch the base again")
    # A model that also reads images or sound may have them in the part of its text model.
    text = config.get("text_config")
    config = {**(text if isinstance(text, dict) else {}), **config}
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def read_generation(raw: bytes, where: str, num_embeddings: int) -> Generation:
    """Return what requests use of a variant's generation config; ArtifactError if it cannot be used.

    Args:
        raw: the JSON document.
        where: the variant's name in an error message.
        num_embeddings: rows of its embedding.
    """
    config = parse_generation_config(raw, where)
    with _refusing(where):
        return Generation.of(config, num_embeddings)


def parse_generation_config(raw: bytes, where: str) -> Mapping[str, Any]:
    """Parse a generation config and check every value that requests take from it.

    Args:
        raw: the JSON document.
        where: the file's name in an error message.

    Raises:
        ArtifactError: transformers or `SamplingParams` refuses a value, or this server cannot obey it.
    """
    with _refusing(where):
        document = parse_json(raw, where)
        # Before transformers reads it, which turns some of these values into objects.
        if isinstance(document, dict):
            _check_obeyed(document)
        GenerationConfig.from_dict(document)
        _check_types(document)
        _check_rules(document)
        try:
            SamplingParams(**sampling_defaults(document))
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        return dict(document)


def _refusing(where: str) -> AbstractContextManager[None]:
    return failures_as(
        lambda reason: ArtifactError(f"{where}: its {GENERATION_FILE} cannot be used: {reason}")
    )


def _check_obeyed(document: Mapping[str, Any]) -> None:
    for name, neutral in REFUSED.items():
        value = document.get(name)
        if value is not None and value is not False and value not in neutral:
            raise ValueError(f"{name} is {value!r}, which this server cannot obey: {_way_out(neutral)}")
    if document.get("cache_implementation") == REFUSED_CACHE:
        raise ValueError(
            f"cache_implementation is {REFUSED_CACHE!r}, which gives other tokens: {_way_out(())}"
        )


def _way_out(neutral: Sequence[object]) -> str:
    return f"leave it out, or set it to {neutral[0]}" if neutral else "leave it out"


def _check_types(document: Mapping[str, Any]) -> None:
    eos = document.get("eos_token_id")
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if len(ids) > MAX_EOS_TOKENS or not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be an id or a list of at most {MAX_EOS_TOKENS} ids")
    for name, kind in DEFAULTED.items():
        value = document.get(name, 0) or 0
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise ValueError(f"{name} must not be {value!r}")
    stop = document.get("stop_strings")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not (
        isinstance(stops, list)
        and len(stops) <= MAX_STOP_STRINGS
        and all(isinstance(each, str) and 1 <= len(each) <= MAX_STOP_CHARS for each in stops)
    ):
        raise ValueError(
            f"stop_strings must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        )


def _check_rules(document: Mapping[str, Any]) -> None:
    """Check the fields of `GenerationRules`; those of sampling alone are checked for a greedy config, too."""
    for name, lowest, highest in (
        ("max_length", 1, MAX_INT), ("min_length", 0, MAX_INT), ("min_new_tokens", 0, MAX_INT),
        ("no_repeat_ngram_size", 0, MAX_NGRAM), ("encoder_no_repeat_ngram_size", 0, MAX_NGRAM),
        ("forced_bos_token_id", 0, MAX_INT),
    ):  # fmt: skip
        value = document.get(name)
        if value is not None and not (type(value) is int and lowest <= value <= highest):
            raise ValueError(f"{name} must be an integer from {lowest} to {highest}")
    for name, least, most in (
        ("encoder_repetition_penalty", 0.01, 100), ("top_h", 1e-9, 1), ("typical_p", 1e-9, MAX_BIAS),
        ("epsilon_cutoff", -MAX_BIAS, MAX_BIAS), ("eta_cutoff", -MAX_BIAS, MAX_BIAS),
    ):  # fmt: skip
        if document.get(name) is not None:
            _require_number(name, document[name], least, most)
    num_ids = 0
    for name in ID_LISTS:
        value = document.get(name) or ()
        num_ids += _num_ids(name, [value] if isinstance(value, int) else value, is_known=name in KNOWN_IDS)
    for each in _list("bad_words_ids", document.get("bad_words_ids")):
        num_ids += _num_ids("bad_words_ids", each or None)
    for pair in _list("sequence_bias", document.get("sequence_bias")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("sequence_bias must be a list of pairs: token ids and a number")
        num_ids += _num_ids("sequence_bias", pair[0] or None)
        _require_number("sequence_bias", pair[1], -MAX_BIAS, MAX_BIAS)
    if num_ids > MAX_RULE_IDS:
        raise ValueError(f"its lists hold {num_ids} token ids, more than {MAX_RULE_IDS}: leave some out")
    decay = document.get("exponential_decay_length_penalty")
    if decay is not None:
        if not isinstance(decay, list) or len(decay) != 2 or type(decay[0]) is not int or decay[0] < 0:
            raise ValueError("exponential_decay_length_penalty must be a number of tokens and a factor")
        _require_number("exponential_decay_length_penalty", decay[1], 1e-9, MAX_DECAY)


def _list(name: str, value: object) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value or []


def _num_ids(name: str, ids: object, *, is_known: bool = True) -> int:
    """Return how many token ids a list has; those that are not `is_known` may be negative, and then name no token."""
    lowest = 0 if is_known else -MAX_INT
    if not isinstance(ids, (list, tuple)) or not all(
        type(each) is int and lowest <= each < MAX_INT for each in ids
    ):
        raise ValueError(f"{name} must be token ids")
    return len(ids)


def _require_number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name} must be from {least:g} to {most:g}")
