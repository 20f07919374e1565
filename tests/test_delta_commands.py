"""The commands that make and read deltas: what they print, their exit codes, and one JSON document where asked."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deltastore import console
from deltastore.checkpoint import Checkpoint
from deltastore.cli import planned_tensors
from peraxis.cli import run
from tests.compressor.helpers.compressing import enriched, rewrite
from tests.compressor.helpers.decoders import make_model
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, make_pair

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    change = Change(added_tokens=2, chat_template=CHAT_TEMPLATE, tied=False)
    return make_pair("qwen2", tmp_path_factory.mktemp("models"), changes=(change,))


@pytest.fixture(scope="module")
def delta(models: TinyModels) -> Path:
    out = models.base.parent / "delta.safetensors"
    assert run(compressing(models, out, "--samples", "16", "--json", "--no-progress")) == 0
    return out


def compressing(models: TinyModels, out: Path, *more: str) -> list[str]:
    return [
        "compress",
        "--base",
        str(models.base),
        "--finetune",
        str(models.finetunes[0]),
        "--out",
        str(out),
        *more,
    ]


def document(args: list[str], capsys: Captured, code: int = 0) -> Any:
    assert run([*args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_compress_prints_its_result_as_json(models: TinyModels, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "delta"
    options = ["--method", "per-axis", "--samples", "16", "--distill-epochs", "1"]
    result = document(compressing(models, out, *options), capsys)
    assert result["artifact_bytes"] == out.stat().st_size
    assert result["ratio"] == pytest.approx(result["full_bytes"] / result["artifact_bytes"])
    assert len(result["digest"]) == len("sha256:") + 64
    matrix = result["tensors"]["model.layers.0.mlp.up_proj.weight"]
    assert matrix["axis"] in ("out", "in")
    assert 0 < matrix["error"] < 1
    assert 0 < result["fidelity"]["weight_error"] < 1
    assert result["num_unchanged"] == 0


def test_a_fine_tune_that_is_the_base_is_warned_of(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    args = [
        "compress",
        "--base",
        str(models.base),
        "--finetune",
        str(models.base),
        "--out",
        str(tmp_path / "d"),
    ]
    assert run([*args, "--method", "scalar", "--samples", "16", "--no-progress"]) == 0
    assert "this delta changes nothing: check --finetune and --base" in capsys.readouterr().err


def test_full_bytes_are_those_of_the_fine_tune_at_16_bits(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    result = document(compressing(models, tmp_path / "delta", "--calibration", "none"), capsys)
    stored = Checkpoint.open(models.finetunes[0]).tensors.values()  # in float32
    assert result["full_bytes"] == sum(tensor.num_bytes for tensor in stored) // 2


def test_compress_prints_a_few_lines_and_nothing_else(
    models: TinyModels, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Progress is shown after a while, and this process may have run for as long.
    monkeypatch.setattr(console, "LINE_INTERVAL_S", math.inf)
    assert run(compressing(models, tmp_path / "delta", "--samples", "16")) == 0
    printed = capsys.readouterr()
    assert "times smaller" in printed.out
    assert "on held-out text: " in printed.out
    assert "weight error" not in printed.out  # which rises where a delta is fitted to text
    assert printed.err == ""


def test_calibration_text_that_is_not_there_is_a_wrong_argument(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    missing = str(tmp_path / "missing.txt")
    assert run(compressing(models, tmp_path / "delta", "--calibration", missing)) == 2
    assert "missing.txt: No such file" in capsys.readouterr().err
    assert not (tmp_path / "delta").exists()


def test_calibration_from_the_command_line_is_written_into_the_artifact(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    options = ["--calibration", "self", "--samples", "16", "--no-refine-signs", "--seed", "3"]
    document(compressing(models, tmp_path / "delta", *options), capsys)
    settings = document(["inspect", str(tmp_path / "delta")], capsys)["compressor"]["settings"]
    assert settings["calibration"]["source"] == "self"
    assert settings["calibration"]["samples"] == 16
    assert settings["calibration"]["seed"] == 3
    assert settings["refine_signs"] is False


def test_a_failed_compress_is_one_json_document(models: TinyModels, tmp_path: Path, capsys: Captured) -> None:
    args = compressing(models, tmp_path / "delta")
    args[2] = str(tmp_path / "missing" / "base")
    assert "no such directory" in document(args, capsys, code=1)["error"]["message"]


def test_merge_writes_a_checkpoint_and_says_so(
    models: TinyModels, delta: Path, tmp_path: Path, capsys: Captured
) -> None:
    args = ["merge", "--base", str(models.base), "--delta", str(delta), "--out", str(tmp_path / "merged")]
    result = document([*args, "--dtype", "float16"], capsys)
    assert result["dtype"] == "float16"
    assert Checkpoint.open(tmp_path / "merged").tensors["model.norm.weight"].dtype == "F16"
    assert run(args) == 2
    assert "is there already" in capsys.readouterr().err


def test_inspect_shows_what_is_inside(delta: Path, capsys: Captured) -> None:
    facts = document(["inspect", str(delta)], capsys)
    assert facts["size_bytes"] == delta.stat().st_size
    assert facts["files"] == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert facts["tensors"]["lm_head.weight"]["against"] == "model.embed_tokens.weight"
    assert (facts["method"], facts["tied"]) == ("both", False)
    assert sum(facts["bytes"].values()) <= facts["size_bytes"]
    assert facts["bytes"]["added"] == 2 * 2 * 64 * 4  # two rows of embedding and head in float32


def test_inspect_prints_a_line_for_every_tensor(delta: Path, capsys: Captured) -> None:
    facts = document(["inspect", str(delta)], capsys)
    assert run(["inspect", str(delta)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert facts["digest"] in lines[0]
    for name in facts["tensors"]:
        assert sum(name in line.split() for line in lines) >= 1, name


def test_inspect_prints_settings_and_fidelity_for_people(delta: Path, capsys: Captured) -> None:
    facts = document(["inspect", str(delta)], capsys)
    assert run(["inspect", str(delta)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("compressor, settings: method both, ") for line in lines)
    assert any(", learn signs True, " in line for line in lines)
    kl = facts["fidelity"]["held_out"]["kl"]
    assert any(line.startswith(f"fidelity, held out: kl {kl:.6g}, agreement ") for line in lines)
    assert not any("{" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibration", "none", "--samples", "8"], "--samples does nothing without calibration text"),
        (["--calibration", "none", "--resume"], "--resume does nothing without calibration text"),
        (["--calibration", "none", "--budget", "2"], "--budget does nothing without calibration text"),
        (
            ["--calibration", "none", "--rate", "1"],
            "--rate does nothing .*: give --calibration self or a file",
        ),
        (["--calibration", "none", "--recipe", "paper"], "--recipe does nothing without calibration text"),
        (["--calibration", "none", "--min-agreement", "1"], "--min-agreement does nothing without"),
        (["--rate", "0.1"], "--rate does nothing with --recipe ours: give --recipe paper with it"),
        (["--axis-loss", "end"], "--axis-loss does nothing with --recipe ours"),
        (["--recipe", "paper", "--no-learn-signs"], "--no-learn-signs does nothing .*: give --recipe ours"),
        (["--recipe", "paper", "--method", "both"], "give --method per-axis or --method scalar with it"),
        (["--recipe", "ours", "--solver", "adamw"], "--solver adamw is the old name of --recipe paper"),
        (["--samples", "0"], "--samples 0: give at least 1, or --calibration none"),
        (["--seed", "-1"], "--seed -1: give 0 to"),
        (["--budget", "1e9"], "--budget 1000000000.0: .* at most 16"),
    ],
)
def test_an_option_that_would_do_nothing_or_no_good_is_a_wrong_argument(
    options: list[str], message: str, models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    capsys.readouterr()
    assert run(compressing(models, tmp_path / "delta", *options)) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--solver", "adamw"], ["--recipe", "paper"]),
        (["--solver", "adamw", "--method", "scalar"], ["--recipe", "paper", "--method", "scalar"]),
        (["--solver", "lstsq"], []),
    ],
)
def test_the_old_solvers_are_recipes(
    old: list[str], new: list[str], models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    options = ["--samples", "8", "--distill-epochs", "0"]
    digests = []
    for number, own in enumerate((old, new)):
        assert (
            run(compressing(models, tmp_path / str(number), *options, *own, "--json", "--no-progress")) == 0
        )
        printed = capsys.readouterr()
        digests.append(json.loads(printed.out)["digest"])
        assert ("is now --recipe" in printed.err) == (own is old)
    assert digests[0] == digests[1]


def test_inspect_shows_planes_and_ranks_and_what_they_take(
    models: TinyModels, delta: Path, tmp_path: Path, capsys: Captured
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"  # 64 x 92
    rich = enriched(delta, tmp_path / "rich", {name: (2, 3)})
    before, after = (document(["inspect", str(path)], capsys) for path in (delta, rich))
    assert (after["tensors"][name]["planes"], after["tensors"][name]["rank"]) == (2, 3)
    assert before["bytes"]["low_rank"] == 0
    assert after["bytes"]["low_rank"] == 2 * 3 * (64 + 92)
    assert after["bytes"]["signs"] == before["bytes"]["signs"] + 64 * 12
    assert after["bytes"]["scales"] == before["bytes"]["scales"] + 2 * (64 + 92) + 4
    assert run(["inspect", str(rich)]) == 0
    printed = capsys.readouterr().out
    assert "low rank 936B" in printed
    assert "planes 2 rank 3" in next(line for line in printed.splitlines() if name in line)


@pytest.mark.parametrize("args", [["inspect"], ["inspect", "a-file", "--plan", "a-directory"]])
def test_inspect_wants_a_file_or_a_plan(args: list[str], capsys: Captured) -> None:
    assert run(args) == 2
    assert "give the FILE of an artifact, or --plan" in capsys.readouterr().err


def test_verify_finds_nothing_wrong_with_a_sound_delta(
    models: TinyModels, delta: Path, capsys: Captured
) -> None:
    assert run(["verify", str(delta), "--base", str(models.base)]) == 0
    assert "sound, and it fits base" in capsys.readouterr().out
    assert document(["verify", str(delta)], capsys)["findings"] == []


def test_verify_exits_with_1_for_another_base(
    models: TinyModels, delta: Path, tmp_path: Path, capsys: Captured
) -> None:
    other = make_pair("qwen2", tmp_path, seed=1).base
    findings = document(["verify", str(delta), "--base", str(other)], capsys, code=1)["findings"]
    assert "made from base 'base'" in findings[0]


@pytest.mark.parametrize("damage", ["truncated", "missing", "checkpoint"])
def test_verify_exits_with_1_for_what_is_no_sound_delta(
    damage: str, models: TinyModels, delta: Path, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "file"
    if damage != "missing":
        content = (delta if damage == "truncated" else models.base / "model.safetensors").read_bytes()
        file.write_bytes(content[:-1] if damage == "truncated" else content)
    assert run(["verify", str(file)]) == 1
    assert capsys.readouterr().out.startswith(f"FOUND: {file}")


def test_verify_finds_nan(models: TinyModels, delta: Path, tmp_path: Path, capsys: Captured) -> None:
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(delta.read_bytes())
    with broken.open("r+b") as file:
        document_length = int.from_bytes(file.read(8), "little")
        norm = json.loads(file.read(document_length))["model.norm.weight"]["data_offsets"][0]
        file.seek(8 + document_length + norm)
        file.write(b"\xff\xff\xff\xff")
    assert run(["verify", str(broken)]) == 1
    assert "'model.norm.weight' holds NaN" in capsys.readouterr().out


MODELS = {
    "Llama-3.1-8B": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        2980,
    ),
    "Qwen3-14B": (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
        4774,
    ),
    "Phi-4": (
        {"model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "pad_token_id": 100349},
        3768,
    ),
}  # fmt: skip


def plan_of(name: str, directory: Path, capsys: Captured) -> Any:
    (directory / "config.json").write_text(json.dumps({**MODELS[name][0], "tie_word_embeddings": False}))
    return document(["inspect", "--plan", str(directory)], capsys)["embeddings"]


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_gives_the_paper_s_sizes_with_embeddings_whole(
    name: str, tmp_path: Path, capsys: Captured
) -> None:
    plan = plan_of(name, tmp_path, capsys)
    assert plan["whole"]["device_bytes"] / 1e6 == pytest.approx(MODELS[name][1], rel=0.01)


def test_the_plan_of_llama_8b_with_everything_at_one_bit_is_one_gigabyte(
    tmp_path: Path, capsys: Captured
) -> None:
    plan = plan_of("Llama-3.1-8B", tmp_path, capsys)["compress"]
    assert plan["device_bytes"] <= 1.02e9
    assert plan["ratio"] > 15.8


def test_the_plan_is_what_compressing_gives(tmp_path: Path, capsys: Captured) -> None:
    models = make_pair("llama", tmp_path)
    for directory in (models.base, models.finetunes[0]):
        rewrite(directory, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    made = document(compressing(models, tmp_path / "delta", "--samples", "16"), capsys)
    plan = document(["inspect", "--plan", str(models.base)], capsys)["embeddings"]["compress"]
    assert (made["device_bytes"], made["full_bytes"]) == (plan["device_bytes"], plan["full_bytes"])


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_the_plan_counts_experts_one_by_one_as_checkpoints_have_them(
    architecture: str, tmp_path: Path
) -> None:
    base = make_model(architecture, tmp_path)
    stored = Checkpoint.open(base).tensors
    assert any(".experts.3." in name for name in stored)
    assert planned_tensors(base)[0] == {name: tensor.shape for name, tensor in stored.items()}


@pytest.mark.parametrize("architecture", ["gpt_oss", "granitemoe"])
def test_commands_take_stacks_of_experts(architecture: str, tmp_path: Path, capsys: Captured) -> None:
    models, out = make_pair(architecture, tmp_path, dtype=torch.bfloat16), tmp_path / "delta"
    assert run(compressing(models, out, "--calibration", "none", "--report", str(tmp_path / "card"))) == 0
    capsys.readouterr()
    assert run(["verify", str(out), "--base", str(models.base)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: sound, and it fits base; ")
    assert run(["inspect", str(out)]) == 0
    [line] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "layers.0" in line and ("4x184x64" in line or "4x64x184" in line)
    ]
    assert re.search(
        r" both +error 0\.\d{4} num_zeros \d+" + (" transposed$" if architecture == "gpt_oss" else "$"), line
    )
    made = document(["inspect", str(out)], capsys)
    assert made["format"] == 2
    # Norms, biases and routers are whole at 16 bits in both.
    plan = document(["inspect", "--plan", str(models.base)], capsys)["embeddings"]["compress"]
    assert (plan["signs_bytes"], plan["scales_bytes"]) == (made["bytes"]["signs"], made["bytes"]["scales"])
    assert plan["device_bytes"] == made["device_bytes"]
    card = (tmp_path / "card" / "README.md").read_text()
    assert ("`gate_up_proj`" if architecture == "gpt_oss" else "`input_linear`") in card
    assert run(["merge", "--base", str(models.base), "--delta", str(out), "--out", str(tmp_path / "m")]) == 0


def test_an_artifact_larger_than_its_fine_tune_is_warned_of(tmp_path: Path, capsys: Captured) -> None:
    models = make_pair("llama", tmp_path, hidden_size=16, intermediate_size=16, head_dim=4, vocab_size=300)
    assert run(compressing(models, tmp_path / "delta", "--calibration", "none", "--embeddings", "whole")) == 0
    printed = capsys.readouterr()
    assert "warning: " in printed.err
    assert "more than the fine-tune itself at 16 bits" in printed.err


def test_the_plan_is_printed_for_people_too(models: TinyModels, capsys: Captured) -> None:
    assert run(["inspect", "--plan", str(models.base)]) == 0
    assert capsys.readouterr().out.count("times smaller") == 2


@pytest.mark.parametrize(
    "content", [None, "{", '{"model_type": "nonsense"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_plan_of_no_model_is_one_error(content: str | None, tmp_path: Path, capsys: Captured) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in document(["inspect", "--plan", str(tmp_path)], capsys, code=1)["error"]["message"]


def test_shapes_of_a_configuration_are_those_of_its_checkpoint(models: TinyModels) -> None:
    stored = Checkpoint.open(models.base).tensors
    assert planned_tensors(models.base)[0] == {name: tensor.shape for name, tensor in stored.items()}
