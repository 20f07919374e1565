"""`peraxis eval --rival lora`: a LoRA of as many bytes as the delta, beside the delta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compressor.rival
import peraxis
from compressor.config import Calibration, CompressConfig, config_of
from compressor.decoder.decoder import Decoder
from compressor.decoder.weights import DeltaModel
from compressor.fidelity import fidelity
from compressor.fit.calibration import calibration_text, split_text
from compressor.pairs import pair_up
from compressor.pipeline import compress
from compressor.rival import Lora, common_rank, lora_of, share
from deltastore.checkpoint import Checkpoint
from deltastore.errors import CheckpointError, UsageError
from deltastore.format.artifact import Artifact
from deltastore.format.sizes import tensor_bytes
from peraxis.cli import run
from tests.compressor.helpers.compressing import rewrite
from tests.compressor.helpers.decoders import CPU
from tests.compressor.helpers.evaluating import Evaluated, document, make_evaluated
from tests.helpers.tiny_models import make_pair, make_tokenizer

Captured = pytest.CaptureFixture[str]
STACK = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return make_evaluated(tmp_path_factory.mktemp("evaluated"))


def opened(base: Path, finetune: Path, delta: Path) -> tuple[Lora, Any, Artifact]:
    pairs = pair_up(Checkpoint.open(base), Checkpoint.open(finetune))
    artifact = Artifact.open(delta)
    return lora_of(pairs, DeltaModel(pairs.base, artifact), CPU, progress=False), pairs, artifact


def nearest(difference: Tensor, rank: int) -> Tensor:
    """The matrix of this rank that is nearest to a difference, in float64."""
    left, sizes, right = torch.linalg.svd(difference.double(), full_matrices=False)
    found: Tensor = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    return found


def rank_of(difference: Tensor) -> int:
    # Rounded to FP16, factors leave singular values of a thousandth and no more where there is no further rank.
    return int(torch.linalg.matrix_rank(difference.double(), rtol=1e-5))


def test_each_matrix_is_the_nearest_of_its_rank(evaluated: Evaluated) -> None:
    lora, pairs, artifact = opened(evaluated.models.base, evaluated.models.finetunes[0], evaluated.delta)
    found = {lora.ranks.rank: 0, lora.ranks.rank + 1: 0}
    for pair in pairs.tensors:
        if artifact.manifest.tensors[pair.name].codec == "whole":
            assert torch.equal(lora.weights.read(pair.name), artifact.whole(pair.name))
            continue
        weight = lora.weights.read(pair.name)
        rows = slice(0, pair.shape[0])
        base, tuned = pair.base_rows(rows).float(), pair.finetune_rows(rows).float()
        own = weight[rows] - base
        rank = rank_of(own)
        found[rank] += 1
        expected = nearest(tuned - base, rank)
        assert float((own - expected).norm() / expected.norm()) < 2e-3
        # Rows that only the fine-tune has are its own.
        assert torch.equal(weight[pair.shape[0] :], pair.finetune.read(pair.tensor.name)[pair.shape[0] :])
    assert found[lora.ranks.rank + 1] == len(lora.ranks.raised)
    assert sum(found.values()) == lora.num_matrices


@pytest.mark.parametrize("method", ["scalar", "per-axis", "both"])
def test_it_takes_the_delta_s_bytes_and_no_more(evaluated: Evaluated, tmp_path: Path, method: Any) -> None:
    base, finetune = evaluated.models.base, evaluated.models.finetunes[0]
    compress(CompressConfig(str(base), str(finetune), tmp_path / "delta", method=method))
    lora, pairs, artifact = opened(base, finetune, tmp_path / "delta")
    coded = [name for name, spec in artifact.manifest.tensors.items() if spec.codec != "whole"]
    sizes = [tensor_bytes(artifact, name) for name in coded]
    budget = sum(size["signs"] + size["scales"] for size in sizes)
    shapes = [pair.shape for pair in pairs.tensors if pair.name in coded]
    num_bytes = sum(
        2 * (rows + columns) * (lora.ranks.rank + (number in lora.ranks.raised))
        for number, (rows, columns) in enumerate(shapes)
    )
    assert lora.ranks.num_bytes == num_bytes <= budget
    assert artifact.size_bytes - lora.size_bytes == budget - num_bytes
    # No matrix's next rank would fit, too.
    assert budget - num_bytes < max(2 * sum(shape) for shape in shapes)


def test_the_command_s_figures_are_those_of_the_adapted_model(evaluated: Evaluated, capsys: Captured) -> None:
    base, finetune = evaluated.models.base, evaluated.models.finetunes[0]
    lora, _, artifact = opened(base, finetune, evaluated.delta)
    ids = make_tokenizer(added_tokens=2)(evaluated.text.read_text())["input_ids"][: 4 * 192]
    teacher, student = (
        Decoder(weights, CPU, torch.float32) for weights in (Checkpoint.open(finetune), lora.weights)
    )
    expected = fidelity(teacher, student, [torch.tensor(ids).view(4, 192)])
    result = document([*evaluated.args(), "--rival", "lora"], capsys)
    rival = result["rival"]
    assert {key: rival[key] for key in expected.as_json()} == pytest.approx(expected.as_json(), rel=1e-5)
    assert rival["kept"] == pytest.approx(1 - rival["kl"] / result["base"]["kl"], rel=1e-4)
    assert (rival["kind"], rival["rank"], rival["num_raised"]) == (
        "lora", lora.ranks.rank, len(lora.ranks.raised)
    )  # fmt: skip
    assert rival["size_bytes"] <= rival["artifact_bytes"] == artifact.size_bytes
    assert "rival" not in document(evaluated.args(), capsys)


def test_people_see_it_below_the_delta(evaluated: Evaluated, capsys: Captured) -> None:
    rival = document([*evaluated.args(), "--rival", "lora"], capsys)["rival"]
    assert run([*evaluated.args(), "--rival", "lora", "--no-progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == [
        "LoRA", f"{rival['kl']:.4g}", f"{100 * rival['agreement']:.2f}%", f"{rival['perplexity']:.4g}",
        f"{100 * rival['kept']:.2f}%",
    ]  # fmt: skip
    assert f"has rank {rival['rank']} ({rival['rank'] + 1} in {rival['num_raised']}): " in lines[7]


def test_python_has_it_as_an_argument(evaluated: Evaluated) -> None:
    base, finetune = evaluated.models.base, evaluated.models.finetunes[0]
    text = str(evaluated.text)
    measured = peraxis.evaluate(base, finetune, evaluated.delta, text, samples=2, rival="lora")
    assert measured.rival is not None
    assert measured.rival.fidelity.kl > 0
    assert peraxis.evaluate(base, finetune, evaluated.delta, text, samples=2).rival is None
    with pytest.raises(UsageError, match="`rival` 'qlora': give 'lora'"):
        peraxis.evaluate(base, finetune, evaluated.delta, text, rival="qlora")  # type: ignore[arg-type]


def test_compress_measures_it_on_the_text_of_the_delta_s_fidelity_and_writes_the_same_bytes(
    evaluated: Evaluated, tmp_path: Path, capsys: Captured
) -> None:
    base, finetune = evaluated.models.base, evaluated.models.finetunes[0]
    options: dict[str, Any] = {"samples": 12, "distill_epochs": 1}
    plain = compress(config_of(base=str(base), finetune=str(finetune), out=tmp_path / "plain", **options))
    out, card = tmp_path / "own", tmp_path / "card"
    flags = ["--samples", "12", "--distill-epochs", "1", "--rival", "lora", "--report", str(card)]
    command = ["compress", "--base", str(base), "--finetune", str(finetune), "--out", str(out), *flags]
    result = document(command, capsys)
    assert out.read_bytes() == (tmp_path / "plain").read_bytes()
    assert plain.rival is None

    lora, pairs, artifact = opened(base, finetune, out)
    teacher = Decoder(pairs.finetune, CPU, torch.float32)
    _, _, test = split_text(calibration_text(Calibration(samples=12), teacher, base=base))
    on_text = {
        name: fidelity(teacher, Decoder(weights, CPU, torch.float32), [torch.stack(test)]).as_json()
        for name, weights in (("delta", DeltaModel(pairs.base, artifact)), ("lora", lora.weights))
    }
    assert artifact.manifest.fidelity["held_out"] == pytest.approx(on_text["delta"], rel=1e-3)
    rival = result["rival"]
    assert {key: rival[key] for key in on_text["lora"]} == pytest.approx(on_text["lora"], rel=1e-3)
    base_kl = artifact.manifest.fidelity["base"]["kl"]
    assert rival["kept"] == pytest.approx(1 - rival["kl"] / base_kl, rel=1e-3)
    text = (card / "README.md").read_text()
    assert f"| LoRA | {rival['kl']:.4g} | {rival['agreement']:.2%} | {rival['perplexity']:.4g} |" in text
    assert f"rank {rival['rank']}, and {rival['rank'] + 1} in {rival['num_raised']} of them" in text
    assert f"which goes {rival['kept']:.2%} of that way." in text


def test_compress_says_it_to_people_and_refuses_it_without_text(
    evaluated: Evaluated, tmp_path: Path, capsys: Captured
) -> None:
    base, finetune = map(str, (evaluated.models.base, evaluated.models.finetunes[0]))
    command = [
        "compress",
        "--base",
        base,
        "--finetune",
        finetune,
        "--out",
        str(tmp_path / "o"),
        "--rival",
        "lora",
    ]
    assert run([*command, "--samples", "12", "--distill-epochs", "0", "--no-progress"]) == 0
    assert "a LoRA of as many bytes, of rank " in capsys.readouterr().out
    assert run([*command, "--calibration", "none"]) == 2
    assert "--rival does nothing without calibration text" in capsys.readouterr().err
    with pytest.raises(UsageError, match="`rival` 'qlora': give 'lora'"):
        config_of(base=base, finetune=finetune, out=tmp_path / "o", rival="qlora")


def test_a_finetune_whose_difference_has_a_low_rank_is_exact(evaluated: Evaluated, tmp_path: Path) -> None:
    """A LoRA is the best code of a LoRA; the figures must show that, too."""
    pair = make_evaluated(tmp_path, added_tokens=0, noise=0.0)
    generator = torch.Generator().manual_seed(1)

    def adapt(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.ndim == 2:
                left = torch.randn(tensor.shape[0], 3, generator=generator)
                tensor += 0.02 * left @ torch.randn(3, tensor.shape[1], generator=generator)

    rewrite(pair.models.finetunes[0], adapt)
    base, finetune = pair.models.base, pair.models.finetunes[0]
    compress(CompressConfig(str(base), str(finetune), pair.delta))
    measured = peraxis.evaluate(base, finetune, pair.delta, str(pair.text), samples=2, rival="lora")
    assert measured.rival is not None
    assert measured.rival.fidelity.kl < measured.delta.kl / 1000


def test_each_expert_of_a_stack_has_factors_of_its_own(tmp_path: Path) -> None:
    models = make_pair("gpt_oss", tmp_path, seed=3)
    base, finetune = models.base, models.finetunes[0]
    compress(CompressConfig(str(base), str(finetune), tmp_path / "delta"))
    lora, pairs, _ = opened(base, finetune, tmp_path / "delta")
    (pair,) = (pair for pair in pairs.tensors if pair.name == STACK)
    own = lora.weights.read(STACK) - pair.base.read(STACK).float()
    differences = pair.finetune.read(STACK).float() - pair.base.read(STACK).float()
    for expert, difference in zip(own, differences, strict=True):
        expected = nearest(difference, rank_of(expert))
        assert float((expert - expected).norm() / expected.norm()) < 2e-3


def test_a_large_matrix_is_decomposed_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    # Singular values that fall slowly, which is hard for a random projection.
    difference = torch.randn(300, 200, generator=generator) * torch.linspace(2, 1, 200)
    exact = compressor.rival._truncated(difference, 12)
    monkeypatch.setattr(compressor.rival, "LARGEST_EXACT", 0)
    state = torch.random.get_rng_state()
    first, second = (compressor.rival._truncated(difference, 12) for _ in range(2))
    assert torch.equal(first.left, second.left)
    assert torch.equal(first.right, second.right)
    assert torch.equal(torch.random.get_rng_state(), state)
    errors = [float((difference - each.left.float() @ each.right.float()).norm()) for each in (first, exact)]
    assert errors[1] <= errors[0] < 1.01 * errors[1]


def test_ranks_are_shared_within_the_bytes() -> None:
    shapes = [(64, 64), (64, 32), (8, 4)]
    # 2 bytes of 128, 96 and 12 numbers for each rank; the last has four ranks at most.
    assert common_rank(shapes, 471) == 0
    assert common_rank(shapes, 472) == 1
    assert common_rank(shapes, 5 * 448 + 4 * 24) == 5
    assert common_rank(shapes, 1 << 30) == 64
    assert common_rank([], 100) == 0
    ranks = share(shapes, [1.0, 0.9, 0.0], 1, 472 + 260)
    # The second gains more per byte, and then the first does not fit.
    assert (sorted(ranks.raised), ranks.num_bytes) == ([1], 472 + 192)
    assert share(shapes, [1.0, 0.9, 0.0], 1, 1000).raised == {0, 1}


def test_a_delta_that_changes_nothing_has_an_empty_rival(tmp_path: Path, capsys: Captured) -> None:
    pair = make_evaluated(tmp_path, added_tokens=0, noise=0.0)
    result = document([*pair.args(), "--rival", "lora"], capsys)
    assert (result["rival"]["rank"], result["rival"]["kl"], result["rival"]["kept"]) == (0, 0.0, None)
    assert run([*pair.args(), "--rival", "lora", "--no-progress"]) == 0
    assert capsys.readouterr().out.splitlines()[4].split()[-1] == "-"


def test_a_finetune_with_nan_is_refused_before_text_is_read(tmp_path: Path, evaluated: Evaluated) -> None:
    pair = make_evaluated(tmp_path)
    rewrite(
        pair.models.finetunes[0],
        lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")),
    )
    pair = replace(pair, text=tmp_path / "absent.txt")
    with pytest.raises(CheckpointError, match="up_proj"):
        peraxis.evaluate(pair.models.base, pair.models.finetunes[0], pair.delta, str(pair.text), rival="lora")
