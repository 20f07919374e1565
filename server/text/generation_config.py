"""Reads generation configs: which end tokens and sampling parameters a variant has by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from deltastore.errors import ArtifactError, CheckpointError
from deltastore.format.header import parse_json
from deltastore.format.manifest import GENERATION_FILE
from server.errors import InvalidRequest
from server.protocol.sampling_params import SamplingParams
from server.text.failures import failures_as

# A model has a few end tokens.
MAX_EOS_TOKENS = 1024

# Sampling parameters that a generation config may set, and their types.
DEFAULTED: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
}


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `SamplingParams` fields that a generation config sets.

    A config without `do_sample` is greedy, as in transformers' `generate()`.
    """
    given = {name: kind for name, kind in DEFAULTED.items() if config.get(name) is not None}
    defaults: dict[str, Any] = {name: kind(config[name]) for name, kind in given.items()}
    if not config.get("do_sample"):
        for name in ("top_p", "top_k", "min_p"):
            defaults.pop(name, None)
        defaults["temperature"] = 0.0
    return defaults


def eos_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens of a generation config."""
    eos = config.get("eos_token_id")
    return frozenset([eos] if isinstance(eos, int) else eos or [])


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
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def parse_generation_config(raw: bytes, where: str) -> Mapping[str, Any]:
    """Parse a generation config and check every value that requests take from it.

    Args:
        raw: the JSON document.
        where: the file's name in an error message.

    Raises:
        ArtifactError: transformers' `GenerationConfig` or `SamplingParams` refuses a value.
    """
    with failures_as(
        lambda reason: ArtifactError(f"{where}: its {GENERATION_FILE} cannot be used: {reason}")
    ):
        document = parse_json(raw, where)
        GenerationConfig.from_dict(document)
        _check_types(document)
        try:
            SamplingParams(**sampling_defaults(document))
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        return dict(document)


def _check_types(document: Mapping[str, Any]) -> None:
    eos = document.get("eos_token_id")
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if len(ids) > MAX_EOS_TOKENS or not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be an id or a list of at most {MAX_EOS_TOKENS} ids")
    for name, kind in DEFAULTED.items():
        value = document.get(name, 0) or 0
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise ValueError(f"{name} must not be {value!r}")
