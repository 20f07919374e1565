"""Reads generation configs: which end tokens and sampling parameters a variant has by default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from deltastore.base.checkpoint import Checkpoint
from deltastore.errors import ArtifactError
from deltastore.format.manifest import GENERATION_FILE
from server.errors import InvalidRequest
from server.sampling_params import SamplingParams

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
    """Read a checkpoint's generation config; without one, take the special tokens of its model config."""
    path = base_dir / GENERATION_FILE
    if path.exists():
        return parse_generation_config(path.read_bytes(), str(path))
    config = Checkpoint.open(base_dir).config
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def parse_generation_config(raw: bytes, where: str) -> Mapping[str, Any]:
    """Parse a generation config and check every value that requests take from it.

    Args:
        raw: the JSON document.
        where: the file's name in an error message.

    Raises:
        ArtifactError: transformers' `GenerationConfig` or `SamplingParams` refuses a value.
    """
    try:
        document = json.loads(raw)
        GenerationConfig.from_dict(document)
        eos = document.get("eos_token_id")
        if not (eos is None or isinstance(eos, int) or all(isinstance(token, int) for token in eos)):
            raise ValueError("eos_token_id must be an id or a list of ids")
        for name, kind in DEFAULTED.items():
            value = document.get(name, 0) or 0
            if isinstance(value, bool) or not isinstance(value, (int, kind)):
                raise ValueError(f"{name} must not be {value!r}")
        SamplingParams(**sampling_defaults(document))
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidRequest) as error:
        raise ArtifactError(f"{where}: its {GENERATION_FILE} cannot be used: {error}"[:500]) from error
    return dict(document)
