"""Fidelity: against whole models and the formulas in float64, and with any cut of tokens into pieces."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import compressor.fidelity
from compressor.fidelity import Fidelity, Predictions, compare, fidelity
from deltastore.errors import CheckpointError
from tests.compressor.helpers.decoders import open_decoder, whole_model
from tests.helpers.tiny_models import Change, TinyModels, make_pair

GENERATOR = torch.Generator().manual_seed(2)
BATCHES = [torch.randint(0, 256, shape, generator=GENERATOR) for shape in ((3, 20), (2, 33))]
PAIRS = {
    "tied": ("gemma", (Change(), Change(noise=0.1))),
    "added": ("llama", (Change(added_tokens=3), Change(added_tokens=3, noise=0.1))),
}


def make(kind: str, directory: Path) -> TinyModels:
    """Two models of one vocabulary: the fine-tunes."""
    architecture, changes = PAIRS[kind]
    return make_pair(architecture, directory, changes=changes)


def logits_of(path: Path, batches: list[Tensor]) -> list[Tensor]:
    """Return the logits of every sequence, by the whole transformers model in float64."""
    model = whole_model(path).double()
    with torch.no_grad():
        return [sequence for ids in batches for sequence in model(ids).logits]


def expected(teacher: Path, student: Path, batches: list[Tensor]) -> Fidelity:
    """The formulas, position by position."""
    divergences, agreeing, losses, losses_finetune = [], [], [], []
    sequences = [ids for batch in batches for ids in batch]
    for ids, ours, theirs in zip(
        sequences, logits_of(student, batches), logits_of(teacher, batches), strict=True
    ):
        p, q = theirs.softmax(-1), ours.softmax(-1)
        divergences += [float((p[t] * (p[t] / q[t]).log()).sum()) for t in range(len(ids))]
        agreeing += [int(p[t].argmax()) == int(q[t].argmax()) for t in range(len(ids))]
        losses += [-math.log(q[t, ids[t + 1]]) for t in range(len(ids) - 1)]
        losses_finetune += [-math.log(p[t, ids[t + 1]]) for t in range(len(ids) - 1)]
    count = len(divergences)
    return Fidelity(
        sum(divergences) / count,
        sum(agreeing) / count,
        math.exp(sum(losses) / len(losses)),
        math.exp(sum(losses_finetune) / len(losses_finetune)),
        count,
    )


def assert_near(actual: Fidelity, wanted: Fidelity) -> None:
    assert actual.kl == pytest.approx(wanted.kl, rel=1e-4)
    assert actual.agreement == wanted.agreement
    assert actual.perplexity == pytest.approx(wanted.perplexity, rel=1e-4)
    assert actual.perplexity_finetune == pytest.approx(wanted.perplexity_finetune, rel=1e-4)
    assert actual.num_tokens == wanted.num_tokens


@pytest.mark.parametrize("kind", PAIRS)
def test_fidelity_is_that_of_whole_models_in_float64(kind: str, tmp_path: Path) -> None:
    models = make(kind, tmp_path)
    teacher, student = models.finetunes
    rows = open_decoder(teacher).num_embeddings
    batches = [*BATCHES, torch.arange(rows - 6, rows)[None]]  # added tokens are the last
    actual = fidelity(open_decoder(teacher), open_decoder(student), batches)
    assert actual.kl > 0.01
    assert_near(actual, expected(teacher, student, batches))


def test_a_model_is_its_own_equal(tmp_path: Path) -> None:
    path = make("tied", tmp_path).finetunes[0]
    actual = fidelity(open_decoder(path), open_decoder(path), BATCHES)
    assert (actual.kl, actual.agreement) == (0.0, 1.0)
    assert actual.perplexity == actual.perplexity_finetune


def test_pieces_of_any_size_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = (open_decoder(path) for path in make("tied", tmp_path).finetunes)
    whole = fidelity(teacher, student, BATCHES)
    # Seven tokens at a time, which divides no sequence.
    monkeypatch.setattr(compressor.fidelity, "LOGITS_NUMEL", 7 * 259)
    monkeypatch.setattr(compressor.fidelity, "DOUBLES_NUMEL", 3 * 259)
    assert_near(fidelity(teacher, student, BATCHES), whole)


def test_no_more_logits_than_asked_for_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, sizes = open_decoder(make("tied", tmp_path).finetunes[0]), []
    predictions = Predictions.of(decoder, BATCHES)
    predictions.head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    monkeypatch.setattr(compressor.fidelity, "LOGITS_NUMEL", 5 * 259 + 1)
    compare(predictions, predictions, BATCHES)
    assert max(sizes) == 5 * 259


def test_a_sequence_of_one_token_counts_for_divergence_alone(tmp_path: Path) -> None:
    teacher, student = (open_decoder(path) for path in make("tied", tmp_path).finetunes)
    both = fidelity(teacher, student, [BATCHES[0], torch.tensor([[5]])])
    one = fidelity(teacher, student, [BATCHES[0]])
    assert (both.num_tokens, one.num_tokens) == (61, 60)
    assert both.perplexity == one.perplexity
    assert both.kl != one.kl


def test_the_mean_is_over_tokens_and_not_over_batches(tmp_path: Path) -> None:
    teacher, student = (open_decoder(path) for path in make("tied", tmp_path).finetunes)
    parts = [fidelity(teacher, student, [batch]) for batch in BATCHES]
    together = fidelity(teacher, student, BATCHES)
    assert together.kl == pytest.approx(sum(part.kl * part.num_tokens for part in parts) / 126)


def test_json_has_six_digits() -> None:
    document = Fidelity(0.123456789, 0.987654321, 1234.56789, 1e300, 7).as_json()
    assert document == {
        "kl": 0.123457,
        "agreement": 0.987654,
        "perplexity": 1234.57,
        "perplexity_finetune": 1e300,
        "num_tokens": 7,
    }


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    teacher, student = make("added", tmp_path).finetunes
    tensors = load_file(student / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, student / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"finetune-1: its logits on this text are not finite"):
        fidelity(open_decoder(teacher), open_decoder(student), BATCHES)


def test_perplexity_of_what_is_all_but_impossible_is_a_number(tmp_path: Path) -> None:
    teacher, student = make("added", tmp_path).finetunes
    tensors = load_file(student / "model.safetensors")
    tensors["lm_head.weight"] *= 1e6
    save_file(tensors, student / "model.safetensors", metadata={"format": "pt"})
    assert math.isfinite(fidelity(open_decoder(teacher), open_decoder(student), BATCHES).perplexity)
