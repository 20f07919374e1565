"""A fine-tune's longer or shorter context travels: manifest, merge, record, /v1/models and the bounds on requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.convert.merge import MergeConfig, merge
from deltastore.architecture import POSITIONS
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, ArtifactTooLarge, CheckpointError
from deltastore.format.artifact import Artifact
from deltastore.format.validate import max_positions
from server.publishing.checks import check_tensors
from tests.compressor.helpers.compressing import compressed, rewrite_config
from tests.helpers.tiny_models import Change, TinyModels, make_pair
from tests.server.helpers.http_app import HttpApp, with_engine
from tests.server.helpers.served import generate, same_up_to_a_tie, serving

OWN, SHORTER, LONGER = 128, 64, 256
LENGTHS = (SHORTER, OWN, LONGER)
GIGABYTE = 1_000_000_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    made = make_pair(
        "llama",
        tmp_path_factory.mktemp("lengths"),
        changes=(Change(),) * len(LENGTHS),
        max_position_embeddings=OWN,
    )
    for length, finetune in zip(LENGTHS, made.finetunes, strict=True):
        rewrite_config(finetune, max_position_embeddings=length)
        compressed(TinyModels(made.base, [finetune]), delta_of(made, length))
    return made


def delta_of(models: TinyModels, length: int) -> Path:
    return models.base.parent / f"{length}.safetensors"


@pytest.mark.parametrize("length", LENGTHS)
def test_the_length_is_in_the_manifest_and_in_the_merged_configuration(
    length: int, models: TinyModels, tmp_path: Path
) -> None:
    delta, base = delta_of(models, length), Base.of(Checkpoint.open(models.base))
    with Artifact.open(delta) as artifact:
        assert artifact.manifest.config[POSITIONS] == length
        assert max_positions(artifact.manifest, base, "it") == (None if length == OWN else length)
    merge(MergeConfig(str(models.base), delta, tmp_path / "merged"))
    assert AutoConfig.from_pretrained(tmp_path / "merged").max_position_embeddings == length


def test_a_longer_context_is_served_beyond_the_bases_and_a_shorter_one_ends_before(
    models: TinyModels, tmp_path: Path
) -> None:
    with serving(models.base, tmp_path / "registry") as served:
        facts = served.engine.facts
        for length in LENGTHS:
            delta = delta_of(models, length)
            record = served.publish(delta, f"variant-{length}")
            assert facts.max_model_len_of(record) == length
            out = tmp_path / f"merged-{length}"
            merge(MergeConfig(str(models.base), delta, out))
            reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            prompt = [7 * number % 250 for number in range(length - 20)]
            tokens, margins = generate(reference, prompt, 20)
            answer = served.ask(record, prompt, max_new_tokens=20).token_ids
            assert same_up_to_a_tie(answer, tokens, margins)
            refusal = served.ask(record, prompt, max_new_tokens=21).end
            assert f"{length} that fit" in str(refusal)
        assert facts.max_model_len_of(None) == OWN


@pytest.mark.parametrize(("setting", "expected"), [(100, [64, 100, 100, 100]), (200, [64, 128, 200, 128])])
def test_the_setting_bounds_every_context(
    setting: int, expected: list[int], models: TinyModels, tmp_path: Path
) -> None:
    with serving(models.base, tmp_path / "registry", max_model_len=setting) as served:
        records = [served.publish(delta_of(models, length), f"variant-{length}") for length in LENGTHS]
        assert [served.engine.facts.max_model_len_of(record) for record in (*records, None)] == expected


def test_each_model_shows_its_own_length(models: TinyModels, tmp_path: Path) -> None:
    async def talk(app: HttpApp) -> None:
        for length in LENGTHS:
            content = delta_of(models, length).read_bytes()
            reply = await app.client.post("/variants", params={"name": f"v{length}"}, content=content)
            assert reply.status_code == 201, reply.text
        cards = (await app.client.get("/v1/models")).json()["data"]
        lengths = {card["id"]: card["max_model_len"] for card in cards}
        assert lengths == {"base": OWN, **{f"v{length}": length for length in LENGTHS}}
        for length in LENGTHS:
            body: dict[str, Any] = {"model": f"v{length}", "prompt": [5] * (length - 1)}
            assert (
                await app.client.post("/v1/completions", json={**body, "max_tokens": 1})
            ).status_code == 200
            reply = await app.client.post("/v1/completions", json={**body, "max_tokens": 2})
            assert reply.status_code == 400
            assert f"{length} that fit" in reply.text
            reply = await app.client.post("/tokenize", json={"model": f"v{length}", "prompt": "a"})
            assert reply.json()["max_model_len"] == length

    with_engine(models.base, tmp_path / "registry", talk)


def test_a_longer_variant_is_refused_by_the_flag_of_an_engine_that_is_made_for_a_length(
    models: TinyModels,
) -> None:
    base = Base.of(Checkpoint.open(models.base))
    with pytest.raises(ArtifactTooLarge, match=rf"started for {OWN}: start it with --max-model-len {LONGER}"):
        check_tensors(delta_of(models, LONGER), base, GIGABYTE, longest_context=OWN)
    assert (
        check_tensors(delta_of(models, LONGER), base, GIGABYTE, longest_context=LONGER).max_positions
        == LONGER
    )
    assert (
        check_tensors(delta_of(models, SHORTER), base, GIGABYTE, longest_context=OWN).max_positions == SHORTER
    )


@pytest.mark.parametrize("value", [0, -1, 1 << 31, True, 1.5, "long", [], {}])
def test_a_length_that_is_no_number_of_tokens_is_refused(value: object, models: TinyModels) -> None:
    base = Base.of(Checkpoint.open(models.base))
    with Artifact.open(delta_of(models, LONGER)) as artifact:
        manifest = artifact.manifest.model_copy(
            update={"config": {**artifact.manifest.config, POSITIONS: value}}
        )
    with pytest.raises(ArtifactError, match="is no number of tokens"):
        max_positions(manifest, base, "it")


def test_rope_that_depends_on_the_length_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    models = make_pair("llama", tmp_path, rope_parameters=rope)
    rewrite_config(models.finetunes[0], max_position_embeddings=LONGER * 4)
    with pytest.raises(CheckpointError, match=f"differs from that of .* in rope_{POSITIONS}"):
        compressed(models, tmp_path / "delta")


def test_a_field_that_nothing_reads_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = make_pair("llama", tmp_path)
    rewrite_config(models.finetunes[0], tokenizer_class="Own", own_field=3)
    for number in range(2):
        compressed(models, tmp_path / f"delta-{number}")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1
    assert "in own_field, which no code of the model reads" in said[0]
