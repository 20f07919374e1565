"""The rules of a variant's generation config hold token for token as `generate()` does it on the merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from deltastore.registry.records import VersionRecord
from server.text.generation_config import sampling_defaults
from tests.server.helpers.drawing import draws_of
from tests.server.helpers.served import Family, Mode, Served, make_family, merged, serving

PROMPT, NUM_NEW = [5, 6, 7, 5, 6, 8, 5, 6], 40
COMBINED: dict[str, Any] = {
    "repetition_penalty": 1.3, "encoder_repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_new_tokens": 4,
    "bad_words_ids": [[9], [5, 6]], "sequence_bias": [[[40], 2.0], [[7, 40], -1.0]], "suppress_tokens": [11, 12],
    "begin_suppress_tokens": [13], "forced_eos_token_id": 20, "exponential_decay_length_penalty": [10, 1.01],
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"forced_eos_token_id": [20, 21]},
    COMBINED,
    {"do_sample": True},
    {"do_sample": True, "top_k": 0, "typical_p": 0.8, "eta_cutoff": 0.01},
    {**COMBINED, "do_sample": True, "top_p": 0.9, "temperature": 0.8, "renormalize_logits": True},
]


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A variant in a server, and the model that it must be equal to."""

    served: Served
    record: VersionRecord
    model: Any

    def generated(self, config: dict[str, Any], seed: int) -> list[int]:
        """Return the tokens of `generate()`."""
        given = GenerationConfig(
            **{"eos_token_id": [257], "pad_token_id": 258, "max_new_tokens": NUM_NEW, **config}
        )

        with torch.inference_mode(), draws_of(seed):
            made = self.model.generate(
                torch.tensor([PROMPT]),
                generation_config=given,
                attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            )
        tokens: list[int] = made[0, len(PROMPT) :].tolist()
        return tokens

    def answered(self, config: dict[str, Any], seed: int) -> list[int]:
        """Return the tokens of the server."""
        sampling = {"max_new_tokens": NUM_NEW, "seed": seed, "temperature": 1.0, **sampling_defaults(config)}
        return self.served.ask(self.record, PROMPT, **sampling).token_ids


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("rules"), seed=5, num_variants=1)


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return merged(family.base, family.artifacts[0], tmp_path_factory.mktemp("merged"))


@pytest.fixture
def variant(family: Family, model: Any, tmp_path: Path, mode: Mode) -> Iterator[Variant]:
    with serving(family.base, tmp_path / "registry", mode) as served:
        yield Variant(served, served.publish(family.artifacts[0], "ruled"), model)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_config_is_obeyed_as_generate_does(config: dict[str, Any], variant: Variant) -> None:
    seeds = range(3) if config.get("do_sample") else range(1)
    want = [variant.generated(config, seed) for seed in seeds]
    assert [variant.answered(config, seed) for seed in seeds] == want
    # The rules matter: without them the tokens are others.
    plain: dict[str, Any] = {"do_sample": True, "top_k": 0} if config.get("do_sample") else {}
    assert want != [variant.generated(plain, seed) for seed in seeds]
