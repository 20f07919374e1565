"""`peraxis eval` on text: its figures, its table, and one line for everything that cannot be evaluated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.config import CompressConfig
from compressor.convert.merge import MergeConfig, merge
from compressor.decoder.decoder import Decoder
from compressor.fidelity import fidelity
from compressor.pipeline import compress
from deltastore.checkpoint import Checkpoint
from peraxis.cli import run
from tests.compressor.helpers.compressing import rewrite
from tests.compressor.helpers.decoders import CPU, open_decoder, whole_model
from tests.compressor.helpers.evaluating import Evaluated, document, make_evaluated
from tests.helpers.tiny_models import TinyModels, make_pair, make_tokenizer

LENGTH = 192  # tokens per sequence where nothing else is said

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return make_evaluated(tmp_path_factory.mktemp("evaluated"))


def batches_of(evaluated: Evaluated) -> list[torch.Tensor]:
    ids = make_tokenizer(added_tokens=2)(evaluated.text.read_text())["input_ids"]
    return [torch.tensor(ids[: 4 * LENGTH]).view(4, LENGTH)]


def test_the_delta_s_figures_are_those_of_the_merged_model(
    evaluated: Evaluated, tmp_path: Path, capsys: Captured
) -> None:
    merge(MergeConfig(str(evaluated.models.base), evaluated.delta, tmp_path / "merged", "float32"))
    expected = fidelity(
        open_decoder(evaluated.models.finetunes[0]), open_decoder(tmp_path / "merged"), batches_of(evaluated)
    )
    result = document(evaluated.args(), capsys)
    assert result["num_sequences"] == 4
    assert result["delta"] == pytest.approx(expected.as_json(), rel=1e-5)
    assert result["tasks"] == {}
    assert result["foreign"] == []


def test_the_base_is_measured_with_the_added_rows_of_the_finetune(
    evaluated: Evaluated, capsys: Captured
) -> None:
    batches = batches_of(evaluated)
    assert int(batches[0].max()) == 260  # a token that the base lacks
    base, finetune = (whole_model(path) for path in (evaluated.models.base, evaluated.models.finetunes[0]))
    base.resize_token_embeddings(261, mean_resizing=False)
    for own, tuned in zip(
        (base.get_input_embeddings(), base.get_output_embeddings()),
        (finetune.get_input_embeddings(), finetune.get_output_embeddings()),
        strict=True,
    ):
        own.weight.data[-2:] = tuned.weight.data[-2:]
    with torch.no_grad():
        log_p, log_q = (model(batches[0]).logits.double().log_softmax(-1) for model in (finetune, base))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert document(evaluated.args(), capsys)["base"]["kl"] == pytest.approx(float(expected), rel=1e-4)


def test_the_share_kept_is_read_on_the_base_s_scale(evaluated: Evaluated, capsys: Captured) -> None:
    result = document(evaluated.args(), capsys)
    assert result["kept"] == pytest.approx(1 - result["delta"]["kl"] / result["base"]["kl"], rel=1e-4)


def test_people_get_a_table_of_three_models(evaluated: Evaluated, capsys: Captured) -> None:
    result = document(evaluated.args(), capsys)
    assert run([*evaluated.args(), "--no-progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:4]}
    assert lines[0].split() == ["KL", "to", "fine-tune", "agreement", "perplexity", "gain", "recovered"]
    assert rows["delta"][0] == f"{result['delta']['kl']:.4g}"
    assert rows["base"][0] == f"{result['base']['kl']:.4g}"
    assert rows["fine-tune"] == ["0", "100.00%", f"{result['delta']['perplexity_finetune']:.4g}", "100.00%"]
    assert [rows[name][-1] for name in ("base", "delta")] == ["0.00%", f"{100 * result['kept']:.2f}%"]
    assert lines[5:] == [
        f"the delta goes {100 * result['kept']:.2f}% of the way from base to fine-tune, by KL",
        f"4 sequences of text, {4 * LENGTH} tokens",
    ]


def test_a_base_that_is_the_finetune_has_no_scale(tmp_path: Path, capsys: Captured) -> None:
    evaluated = make_evaluated(tmp_path, added_tokens=0, noise=0.0)
    result = document(evaluated.args(text="self"), capsys)
    assert (result["kept"], result["base"]["kl"], result["delta"]["kl"]) == (None, 0.0, 0.0)


def test_an_adapter_is_a_finetune_as_it_is_when_compressing(tmp_path: Path, capsys: Captured) -> None:
    base, text = make_pair("llama", tmp_path).base, tmp_path / "text.txt"
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft's own
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
        adapted.save_pretrained(str(tmp_path / "adapter"))
    compress(CompressConfig(str(base), str(tmp_path / "adapter"), tmp_path / "delta"))
    text.write_text("The quick brown fox. " * 50)
    evaluated = Evaluated(TinyModels(base, [tmp_path / "adapter"]), tmp_path / "delta", text)
    result = document(evaluated.args(), capsys)
    assert 0 < result["delta"]["kl"] < result["base"]["kl"]


def test_text_can_be_sampled_from_the_finetune(evaluated: Evaluated, capsys: Captured) -> None:
    result = document(evaluated.args(text="self"), capsys)
    assert result["delta"]["num_tokens"] == 4 * LENGTH
    assert result == document(evaluated.args(text="self"), capsys)


def test_a_finetune_that_unties_its_head_is_compared_whole(tmp_path: Path, capsys: Captured) -> None:
    evaluated = make_evaluated(tmp_path, "qwen2", tied=False)
    merge(MergeConfig(str(evaluated.models.base), evaluated.delta, tmp_path / "merged", "float32"))
    teacher, student = (
        Decoder(Checkpoint.open(path), CPU, torch.float32)
        for path in (evaluated.models.finetunes[0], tmp_path / "merged")
    )
    expected = fidelity(teacher, student, batches_of(evaluated)).kl
    assert document(evaluated.args(), capsys)["delta"]["kl"] == pytest.approx(expected, rel=1e-4)


def test_another_finetune_of_the_same_shapes_is_noticed(evaluated: Evaluated, capsys: Captured) -> None:
    args = evaluated.args(finetune=evaluated.models.finetunes[1])
    assert "model.norm.weight" in document(args, capsys)["foreign"]
    assert run([*args, "--no-progress"]) == 0
    assert "of the delta is not as in the fine-tune: was it made from another?" in capsys.readouterr().out


def short(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    (directory / "short.txt").write_text("Too little.")
    return {"text": directory / "short.txt", "samples": 100}


def missing_text(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    return {"text": directory / "none.txt"}


def wrong_base(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    other = make_pair("llama", directory, seed=9, changes=())
    return {"base": other.base}


def other_architecture(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    return {"finetune": make_pair("qwen3", directory).finetunes[0]}


def other_vocabulary(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    return {"finetune": evaluated.models.finetunes[2]}


def corrupt(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    (directory / "corrupt").write_bytes(evaluated.delta.read_bytes()[:-7])
    return {"delta": directory / "corrupt"}


def missing(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    return {"delta": directory / "missing"}


def diverged(evaluated: Evaluated, directory: Path) -> dict[str, Any]:
    pair = make_evaluated(directory)
    rewrite(pair.models.finetunes[0], lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    return {"base": pair.models.base, "finetune": pair.models.finetunes[0], "delta": pair.delta}


BAD: list[tuple[Callable[[Evaluated, Path], dict[str, Any]], int, str]] = [
    (short, 2, "short.txt: its text makes 0 sequences of 192 tokens, too few"),
    (missing_text, 2, "none.txt: No such file or directory: give --text a text file"),
    (lambda evaluated, directory: {"text": "none"}, 2, "--text none: give a .txt or .jsonl file"),
    (lambda evaluated, directory: {"samples": 0}, 2, "'--samples'"),
    (lambda evaluated, directory: {"tasks": "a,,b"}, 2, "--tasks 'a,,b'"),
    (wrong_base, 1, "delta.safetensors: made from base 'base'"),
    (other_architecture, 1, "finetune-0: its configuration differs"),
    (other_vocabulary, 1, "'model.embed_tokens.weight' has shape [261, 64] and that of"),
    (corrupt, 1, "corrupt"),
    (missing, 1, "missing: No such file"),
    (diverged, 1, "finetune-0: its logits on this text are not finite"),
    (lambda evaluated, directory: {"base": directory / "gone"}, 1, "gone: no such directory"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_cannot_be_evaluated_is_one_line(
    number: int, evaluated: Evaluated, tmp_path: Path, capsys: Captured
) -> None:
    bad, code, message = BAD[number]
    args = [*evaluated.args(**bad(evaluated, tmp_path)), "--no-progress"]
    capsys.readouterr()
    assert run(args) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert "--calibration" not in captured.err


def test_an_architecture_that_cannot_be_run_block_by_block_is_one_line(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(Decoder, "run", lambda self, *args: (_ for _ in ()).throw(self._refusal("give two")))
    message = document(evaluated.args(), capsys, code=1)["error"]["message"]
    assert message.endswith("cannot be run block by block: merge it and compare whole models")
