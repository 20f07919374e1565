"""The demo of the user's own pair, on tiny models: directories and a hub on loopback, a real server, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.sources import load_tokenizer
from deltastore.errors import CheckpointError, MemoryTooSmall, NotServable, PeraxisError, UsageError
from peraxis.cli import run
from peraxis.demo import own_pair
from peraxis.demo.own_pair import OwnPair, try_pair, variant_name
from tests.compressor.helpers.compressing import rewrite_config
from tests.helpers.hub import Hub, asked_hub
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, make_pair
from tests.server.helpers.live_server import clean_environment


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have memory free, whatever else runs on this machine; a test of short memory replaces it."""
    monkeypatch.setattr(own_pair, "available_bytes", lambda: 1 << 40)


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    """Make a base, a fine-tune without a chat template and one with."""
    changes = (Change(), Change(chat_template=CHAT_TEMPLATE, added_tokens=2))
    return make_pair("llama", tmp_path / "models", changes=changes, max_position_embeddings=1024)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with asked_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def pair(base: object, finetune: object, work: Path) -> OwnPair:
    return OwnPair(str(base), str(finetune), (), work, keep=False)


def ignore(line: str) -> None:
    pass


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def refused(base: object, finetune: object, work: Path, kind: type[PeraxisError]) -> str:
    """Return the message of a refusal, after which nothing is left in the working directory."""
    with pytest.raises(kind) as caught:
        try_pair(pair(base, finetune, work), ignore)
    assert not list(work.iterdir())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.deploy
def test_a_pair_on_the_hub_is_fetched_compressed_served_and_asked(
    models: TinyModels, hub: Hub, tmp_path: Path
) -> None:
    base, finetune = hub.add_directory("base", models.base), hub.add_directory("tuned", models.finetunes[0])
    args = ("--base", base, "--finetune", finetune, "--prompt", "hello", "--prompt", "good day")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "peraxis", "demo", *args],
        cwd=tmp_path,
        # The server must not take the user's settings for its own.
        env={
            **clean_environment(),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "PERAXIS_AUTH": "keys",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in models.base.iterdir())
    assert "fetching acme/base from the hub: " in done.stderr
    assert f"{size / 1e3:.0f}kB" in done.stderr
    assert "> hello" in done.stdout
    assert "> good day" in done.stdout
    assert "fine-tune itself" in done.stdout
    assert "first tokens that are the fine-tune's" in done.stdout
    delta = tmp_path / "peraxis-demo" / "tuned-demo.safetensors"
    assert list(delta.parent.iterdir()) == [delta]
    snapshot = next((tmp_path / "hf" / "hub" / "models--acme--base" / "snapshots").iterdir())
    assert f"peraxis serve --base {snapshot} --registry peraxis-demo/registry" in done.stdout
    assert "peraxis push peraxis-demo/tuned-demo.safetensors --name tuned" in done.stdout
    assert "http://localhost:8000/v1/completions" in done.stdout


def test_a_fine_tune_with_a_template_is_asked_through_it_and_left_out_where_memory_is_short(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # More than the base takes, less than transformers does.
    monkeypatch.setattr(own_pair, "available_bytes", lambda: 100_000_000)
    try_pair(pair(models.base, models.finetunes[1], tmp_path / "work"), ignore)
    out = capsys.readouterr().out
    assert all(f"> {question}" in out for question in own_pair.QUESTIONS)
    assert "base (no template)" in out
    assert "The fine-tune itself is left out: it needs about 1.07GB of memory, and 100MB are free." in out
    assert "peraxis chat finetune-1" in out


def test_a_fine_tune_answers_as_transformers_generates(models: TinyModels) -> None:
    prompts = own_pair.Prompts(("hello",), is_chat=True, base_is_chat=False)
    answers = own_pair.finetune_answers(models.base, models.finetunes[1], prompts, ignore)
    assert not isinstance(answers, str), answers
    model: Any = AutoModelForCausalLM.from_pretrained(models.finetunes[1])
    tokenizer = load_tokenizer(models.finetunes[1])
    inputs = tokenizer("<user>hello\n<assistant>", add_special_tokens=False, return_tensors="pt")
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=own_pair.MAX_NEW_TOKENS)
    assert answers[0].token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_fine_tune_that_transformers_cannot_run_is_refused_by_its_process(models: TinyModels) -> None:
    rewrite_config(models.finetunes[0], model_type="unheard-of")
    task = {
        "model": str(models.finetunes[0]),
        "base": str(models.base),
        "tokenizer": str(models.base),
        "dtype": "float32",
        "texts": ["hello"],
        "is_chat": False,
        "needed_bytes": 0,
    }
    with pytest.raises(CheckpointError, match=r"finetune-0: transformers cannot load it: .*unheard-of"):
        own_pair.generate_in_this_process(task)


def test_a_fine_tune_whose_process_fails_is_left_out_with_the_reason(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for the program that the process would run.
    failing = tmp_path / "modules" / "peraxis" / "demo" / "own_pair.py"
    failing.parent.mkdir(parents=True)
    for package in (failing.parent, failing.parent.parent):
        (package / "__init__.py").touch()
    failing.write_text("raise ValueError('no weights')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    prompts = own_pair.Prompts(("hello",), is_chat=False, base_is_chat=False)
    reason = own_pair.finetune_answers(models.base, models.finetunes[0], prompts, ignore)
    assert reason == "transformers could not run it (ValueError: no weights)"


def test_an_interruption_names_the_delta_and_removes_the_rest(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_pair, "finetune_answers", interrupt)
    lines = list[str]()
    with pytest.raises(KeyboardInterrupt):
        try_pair(pair(models.base, models.finetunes[0], tmp_path / "work"), lines.append)
    delta = tmp_path / "work" / "finetune-0-demo.safetensors"
    assert list(delta.parent.iterdir()) == [delta]
    assert str(delta) in lines[-1]


def test_an_adapter_is_merged_and_compressed(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: Any = AutoModelForCausalLM.from_pretrained(models.base)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        # peft uses what transformers deprecates.
        warnings.simplefilter("ignore")
        peft.get_peft_model(adapted, lora).save_pretrained(str(tmp_path / "adapter"))
    monkeypatch.setattr(own_pair, "finetune_answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        try_pair(pair(models.base, tmp_path / "adapter", tmp_path / "work"), ignore)
    assert (tmp_path / "work" / "adapter-demo.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "it is quantised"),
        ({"model_type": "mixtral", "num_local_experts": 2}, "modules with weights are neither linear"),
        ({"model_type": "t5"}, "is no causal language model"),
    ],
)
def test_a_base_that_cannot_be_served_is_refused_with_its_configuration_alone_fetched(
    change: dict[str, Any], expected: str, models: TinyModels, hub: Hub, tmp_path: Path
) -> None:
    rewrite_config(models.base, **change)
    base, finetune = hub.add_directory("base", models.base), hub.add_directory("tuned", models.finetunes[0])
    message = refused(base, finetune, tmp_path / "work", NotServable)
    assert message.startswith("acme/base: ")
    assert expected in message
    assert hub.fetched() == {"config.json"}


def test_another_architecture_is_refused_with_the_configurations_alone_fetched(
    models: TinyModels, hub: Hub, tmp_path: Path
) -> None:
    rewrite_config(models.finetunes[0], rms_norm_eps=0.5)
    base, finetune = hub.add_directory("base", models.base), hub.add_directory("tuned", models.finetunes[0])
    message = refused(base, finetune, tmp_path / "work", CheckpointError)
    assert "acme/tuned: its configuration differs from that of acme/base in rms_norm_eps" in message
    assert hub.fetched() == {"config.json"}


def test_a_model_without_safetensors_is_refused_before_anything_is_fetched(
    models: TinyModels, hub: Hub, tmp_path: Path
) -> None:
    (models.base / "model.safetensors").rename(models.base / "pytorch_model.bin")
    base, finetune = hub.add_directory("base", models.base), hub.add_directory("tuned", models.finetunes[0])
    message = refused(base, finetune, tmp_path / "work", CheckpointError)
    assert "acme/base: it has no safetensors files on the hub" in message
    assert not hub.fetched()


def test_a_base_larger_than_memory_is_refused_before_its_weights_are_fetched(
    models: TinyModels, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_pair, "available_bytes", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    base, finetune = hub.add_directory("base", models.base), hub.add_directory("tuned", models.finetunes[0])
    assert "1.00kB are free" in refused(base, finetune, tmp_path / "work", MemoryTooSmall)
    assert hub.fetched() == {"config.json"}


def test_a_pair_that_does_not_match_gets_the_error_of_compress(models: TinyModels, tmp_path: Path) -> None:
    config = json.loads((models.base / "config.json").read_text())
    other = make_pair("llama", tmp_path / "other", changes=(), hidden_size=32, max_position_embeddings=1024)
    (other.base / "config.json").write_text(json.dumps(config))
    message = refused(models.base, other.base, tmp_path / "work", CheckpointError)
    assert "give the base that it was tuned from" in message


@pytest.mark.parametrize("missing", ["./none", "/none"])
def test_a_directory_that_is_missing_is_refused(missing: str, models: TinyModels, tmp_path: Path) -> None:
    assert f"{missing}: no such directory" in refused(
        models.base, missing, tmp_path / "work", CheckpointError
    )


def test_a_directory_without_a_checkpoint_is_refused(models: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refused(models.base, tmp_path / "empty", tmp_path / "work", CheckpointError)
    assert "it has no config.json" in message


def test_a_work_directory_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give --work a directory that can be written"):
        try_pair(pair("./none", "./none", tmp_path / "file" / "work"), ignore)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--base", "x"], "--base and --finetune go together"),
        (["--finetune", "x"], "--base and --finetune go together"),
        (["--prompt", "hello"], "--prompt is for a pair of your own"),
        (["--base", "x", "--finetune", "y", "--prompt", " "], "--prompt is empty"),
    ],
)
def test_options_that_lack_each_other_are_one_usage_error(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = dict(os.environ)
    assert run(["demo", *args]) == 2
    assert f"error: {expected}" in capsys.readouterr().err
    assert environment == dict(os.environ)


@pytest.mark.parametrize(
    ("finetune", "name"),
    [
        ("acme/Tuned-7B.v2", "Tuned-7B.v2"),
        ("acme/_hidden", "hidden"),
        ("acme/base", "my-finetune"),
        ("..", "my-finetune"),
        ("acme/" + "x" * 90, "x" * 64),
    ],
)
def test_a_variant_is_named_after_its_fine_tune(
    finetune: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ü" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "ü" / "inner")
    assert variant_name(finetune) == name
