"""Variants in a model of transformers: each row's tokens are the merged checkpoint's, and detaching leaves no trace."""

from __future__ import annotations

import copy
import pickle
import re
import runpy
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import peraxis
from deltastore.errors import (
    ArtifactError,
    BaseMismatch,
    CheckpointError,
    NotServable,
    PeraxisError,
    UsageError,
)
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    MERGED_ONLY,
    MORE_SERVED,
    SERVED_TOO,
    VOCAB_SIZE,
    WRAPPERS,
    Change,
    TinyModels,
    load_whole,
    make_base,
    make_pair,
    make_tokenizer,
    shrunk,
)
from tests.server.helpers.served import WAIT_S, make_delta, merged

FAMILIES = (*ARCHITECTURES, *MORE_SERVED, *SERVED_TOO, *WRAPPERS)
EXAMPLE = Path(__file__).parents[2] / "examples" / "attach.py"
PAD = 258
# Three prompts, padded on the left. Longer than the windows of families that have some.
PROMPTS = torch.tensor([
    [5, 200, 17, 99, 3, 120, 64, 250, 31, 77, 180, 9],
    [PAD, PAD, PAD, 42, 7, 7, 190, 23, 11, 54, 16, 201],
    [PAD, 88, 14, 230, 5, 61, 149, 33, 72, 8, 19, 4],
])  # fmt: skip
MASK = (PROMPTS != PAD).long()
TOKENS = 6


def deltas_of(models: TinyModels) -> dict[str, Path]:
    """Compress each fine-tune, by the names `a`, `b`, ..."""
    names = "abcd"[: len(models.finetunes)]
    return {
        name: make_delta(models.base, finetune, models.base.parent / f"{name}.safetensors", method="both")
        for name, finetune in zip(names, models.finetunes, strict=True)
    }


def answers(model: Any, rows: slice = slice(None), **options: Any) -> Tensor:
    """Return the greedy tokens [rows, tokens] that follow the prompts."""
    settings = {
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": PAD,
        "eos_token_id": None,
        **options,
    }
    made: Tensor = model.generate(PROMPTS[rows], attention_mask=MASK[rows], **settings)
    return made[:, PROMPTS.shape[1] :]


@torch.inference_mode()
def logits_of(model: Any, **options: Any) -> Tensor:
    made: Tensor = model(input_ids=PROMPTS, attention_mask=MASK, **options).logits
    return made


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rows_have_the_merged_checkpoints_tokens(architecture: str, tmp_path: Path) -> None:
    models = make_pair(architecture, tmp_path, seed=2, changes=(Change(), Change()))
    deltas = deltas_of(models)
    model = load_whole(models.base)
    alone = [merged(models.base, file, tmp_path / name) for name, file in deltas.items()]
    wanted = [alone[0], model, alone[1]]
    want = [answers(each, slice(row, row + 1))[0] for row, each in enumerate(wanted)]
    values = [logits_of(each)[row] for row, each in enumerate(wanted)]
    assert len({tuple(row.tolist()) for row in want}) > 1
    with peraxis.attach(model, deltas) as attached:
        with attached.using(["a", None, "b"]):
            got, logits = answers(model), logits_of(model)
            last = logits_of(model, logits_to_keep=1)
        with attached.using("b"):
            of_b = answers(model)
    assert torch.equal(got, torch.stack(want))
    for row, value in enumerate(values):
        real = MASK[row].bool()
        torch.testing.assert_close(logits[row][real], value[real], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(last[row, -1], value[-1], rtol=1e-4, atol=2e-4)
    assert torch.equal(of_b, answers(alone[1]))


def test_positions_that_all_rows_share_are_each_variants_own(tmp_path: Path) -> None:
    # Its model looks learned positions up once for a batch.
    finetune = make_base(shrunk("gpt_bigcode"), tmp_path / "base")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in finetune.parameters():
            value.add_(0.5 * value.std() * torch.randn(value.shape, generator=generator))
    finetune.save_pretrained(tmp_path / "finetune")
    make_tokenizer().save_pretrained(tmp_path / "finetune")
    delta = make_delta(tmp_path / "base", tmp_path / "finetune", tmp_path / "my.safetensors", method="both")
    model = load_whole(tmp_path / "base")
    alone = merged(tmp_path / "base", delta, tmp_path / "merged")
    with torch.inference_mode(), peraxis.attach(model, delta) as attached, attached.using(["my", None, "my"]):
        got = model(input_ids=PROMPTS).logits
        with attached.using(None):
            base = model(input_ids=PROMPTS).logits
        want = alone(input_ids=PROMPTS).logits
    assert (want - base).abs().max() > 0.1
    torch.testing.assert_close(got[::2], want[::2], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(got[1], base[1], rtol=1e-4, atol=2e-4)


@dataclass(frozen=True, slots=True)
class Setup:
    """A base, its deltas, the merged models by variant, and a model to attach to."""

    models: TinyModels
    deltas: dict[str, Path]
    merged: dict[str | None, Any]
    model: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    directory = tmp_path_factory.mktemp("attached")
    # The first is as the base, the second has tokens of its own.
    models = make_pair("llama", directory, seed=3, changes=(Change(), Change(), Change(added_tokens=3)))
    deltas = deltas_of(models)
    alone: dict[str | None, Any] = {
        name: merged(models.base, file, directory / f"merged-{name}") for name, file in deltas.items()
    }
    base, model = load_whole(models.base), load_whole(models.base)
    # transformers adds attributes of its own at first use.
    answers(model)
    answers(model, cache_implementation="static")
    return Setup(models, deltas, {None: base, **alone}, model)


@pytest.fixture
def setup(made: Setup) -> Iterator[Setup]:
    """The shared models, which every test leaves as they were."""
    values = {name: value.clone() for name, value in made.model.state_dict().items()}
    before = attributes(made.model)
    yield made
    assert attributes(made.model) == before
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, values[name]), name


def attributes(model: nn.Module) -> dict[str, Any]:
    """Return the names of each module's attributes, parameters and hooks."""
    return {
        name: ({*vars(module)}, {*module._parameters}, {*module._forward_hooks}, {*module._forward_pre_hooks})
        for name, module in model.named_modules()
    }


def rows_of(setup: Setup, chosen: list[str | None], **options: Any) -> Tensor:
    """Return what each row's own model generates for it, padded to the longest vocabulary's tokens."""
    return torch.cat([
        answers(setup.merged[name], slice(row, row + 1), **options) for row, name in enumerate(chosen)
    ])  # fmt: skip


@pytest.mark.parametrize("chosen", [["a", None, "b"], [None, "a", "a"], ["b", "b", "b"], ["c", None, "a"]])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_generate_expands_the_rows_that_were_chosen(
    setup: Setup, chosen: list[str | None], options: dict[str, Any]
) -> None:
    with peraxis.attach(setup.model, setup.deltas) as attached, attached.using(chosen):
        got = answers(setup.model, **options)
    assert torch.equal(got, rows_of(setup, chosen, **options))


def test_each_of_several_samples_is_its_rows_variant(setup: Setup) -> None:
    settings: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "top_k": 1}
    with peraxis.attach(setup.model, setup.deltas) as attached, attached.using(["a", None, "b"]):
        got = answers(setup.model, **settings)
    assert got.shape == (12, TOKENS)
    assert torch.equal(got, rows_of(setup, ["a", None, "b"]).repeat_interleave(4, 0))


def test_one_artifact_alone_is_what_the_model_answers(setup: Setup) -> None:
    with peraxis.attach(setup.model, setup.deltas["a"]) as attached:
        assert attached.variants == ("a",)
        assert torch.equal(answers(setup.model), answers(setup.merged["a"]))
        with attached.using(None):
            assert torch.equal(answers(setup.model), answers(setup.merged[None]))
        with peraxis.open(setup.deltas["b"]) as opened, pytest.raises(UsageError, match="detach them first"):
            peraxis.attach(setup.model, opened)
        assert torch.equal(answers(setup.model), answers(setup.merged["a"]))
    with peraxis.open(setup.deltas["b"]) as opened, peraxis.attach(setup.model, opened):
        assert torch.equal(answers(setup.model), answers(setup.merged["b"]))


def test_after_detaching_weights_and_outputs_are_the_same_bits(setup: Setup, tmp_path: Path) -> None:
    before, tokens = logits_of(setup.model), answers(setup.model)
    parameters = dict(setup.model.named_parameters())
    attached = peraxis.attach(setup.model, setup.deltas)
    with attached.using(["a", None, "b"]):
        assert not torch.equal(logits_of(setup.model)[0], before[0])
        setup.model.save_pretrained(tmp_path)
    attached.detach()
    attached.detach()
    assert all(value is parameters[name] for name, value in setup.model.named_parameters())
    assert torch.equal(logits_of(setup.model), before)
    assert torch.equal(answers(setup.model), tokens)
    saved = load_whole(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in setup.model.state_dict().items())
    with pytest.raises(UsageError, match="the variants are detached"):
        attached.using("a")


def test_the_bases_rows_are_the_same_bits_beside_variants(setup: Setup) -> None:
    before = logits_of(setup.model)
    with peraxis.attach(setup.model, setup.deltas) as attached:
        with attached.using(["a", None, "b"]):
            mixed = logits_of(setup.model)
        with attached.using([None] * 3):
            assert torch.equal(logits_of(setup.model), before)
    assert torch.equal(mixed[1], before[1])


def test_a_variants_own_tokens_have_logits_and_rows(setup: Setup) -> None:
    ids = torch.tensor([[5, VOCAB_SIZE + 1, 7, VOCAB_SIZE + 2], [5, 6, 7, 8]])
    with torch.inference_mode():
        want = setup.merged["c"](input_ids=ids[:1]).logits[0]
        base = setup.merged[None](input_ids=ids[1:]).logits[0]
        with peraxis.attach(setup.model, setup.deltas) as attached, attached.using(["c", None]):
            got = setup.model(input_ids=ids).logits
            with pytest.raises(UsageError, match="tokens that the base lacks"):
                setup.model(input_ids=ids, labels=ids)
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(got[1, :, :VOCAB_SIZE], base, rtol=1e-4, atol=2e-4)
    assert (got[1, :, VOCAB_SIZE:] == -torch.inf).all()


def test_the_body_alone_answers_as_the_variant(setup: Setup) -> None:
    with torch.inference_mode():
        want = setup.merged["a"].model(input_ids=PROMPTS, attention_mask=MASK).last_hidden_state
        with peraxis.attach(setup.model, setup.deltas["a"]):
            got = setup.model.model(input_ids=PROMPTS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(got[MASK.bool()], want[MASK.bool()], rtol=1e-4, atol=2e-4)


def test_attaching_in_inference_mode_is_for_calls_outside_of_it(setup: Setup) -> None:
    with torch.inference_mode():
        attached = peraxis.attach(setup.model, setup.deltas["a"])
    with attached, torch.no_grad():
        # More tokens than there is memory for at first.
        long = torch.arange(1200)[None] % 250
        got = setup.model(input_ids=long, logits_to_keep=1).logits
        want = setup.merged["a"](input_ids=long, logits_to_keep=1).logits
        assert torch.equal(answers(setup.model), answers(setup.merged["a"]))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_call_that_fails_leaves_the_next_one_right(setup: Setup) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with peraxis.attach(setup.model, setup.deltas) as attached, attached.using(["a", None, "b"]):
        hook = setup.model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            answers(setup.model)
        hook.remove()
        assert torch.equal(answers(setup.model), rows_of(setup, ["a", None, "b"]))


def test_threads_generate_as_what_was_chosen_when_they_began(setup: Setup) -> None:
    got: dict[str, Tensor] = {}

    def generate(name: str, begun: threading.Event) -> None:
        def wait(ids: Tensor, scores: Tensor) -> Tensor:
            begun.set()
            return scores

        got[name] = answers(setup.model, logits_processor=[wait], max_new_tokens=30)

    with peraxis.attach(setup.model, setup.deltas) as attached:
        threads = []
        for name in ("a", "b"):
            begun = threading.Event()
            with attached.using(name):
                threads.append(threading.Thread(target=generate, args=(name, begun)))
                threads[-1].start()
                assert begun.wait(WAIT_S)
        for thread in threads:
            thread.join()
    for name in ("a", "b"):
        assert torch.equal(got[name], answers(setup.merged[name], max_new_tokens=30))


def test_nothing_is_attached_or_detached_while_the_model_generates(setup: Setup) -> None:
    refused: list[str] = []

    def probe(ids: Tensor, scores: Tensor) -> Tensor:
        for call in (lambda: peraxis.attach(setup.model, setup.deltas["b"]), lambda: attached.detach()):
            with pytest.raises(UsageError) as error:
                call()
            refused.append(str(error.value))
        return scores

    def attach(ids: Tensor, scores: Tensor) -> Tensor:
        with pytest.raises(UsageError, match="is computing or generating: attach when"):
            peraxis.attach(setup.model, setup.deltas["b"])
        return scores

    answers(setup.model, logits_processor=[attach])
    with peraxis.attach(setup.model, setup.deltas["a"]) as attached:
        answers(setup.model, logits_processor=[probe])
        thread = threading.Thread(target=answers, args=(setup.model,), kwargs={"logits_processor": [probe]})
        thread.start()
        thread.join()
    assert refused.count("the model is computing or generating: detach when that has ended") == 2 * TOKENS


def test_it_refuses_gradients_and_training(setup: Setup) -> None:
    with peraxis.attach(setup.model, setup.deltas["a"]):
        with pytest.raises(
            UsageError, match=r"hooks have no gradients: call the model in `torch\.no_grad\(\)`"
        ):
            setup.model(input_ids=PROMPTS)
        setup.model.train()
        try:
            with pytest.raises(UsageError, match=r"not trained: call `model\.eval\(\)`"), torch.no_grad():
                setup.model(input_ids=PROMPTS)
        finally:
            setup.model.eval()
        setup.model.requires_grad_(False)
        try:
            assert not setup.model(input_ids=PROMPTS).logits.requires_grad
        finally:
            setup.model.requires_grad_(True)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("z", "no variant 'z' is attached: choose among a, b, c, or None"),
        (["a", "z", None], "no variant 'z'"),
        ([], "got no rows"),
    ],
)
def test_names_that_are_not_attached_are_one_error(setup: Setup, rows: Any, reason: str) -> None:
    with peraxis.attach(setup.model, setup.deltas) as attached, pytest.raises(UsageError, match=reason):
        attached.using(rows)


@torch.inference_mode()
def test_rows_that_do_not_fit_the_batch_are_one_error(setup: Setup) -> None:
    with peraxis.attach(setup.model, setup.deltas) as attached:
        with pytest.raises(
            UsageError, match=r"several variants are attached \(a, b, c\): choose with `using`"
        ):
            setup.model(input_ids=PROMPTS)
        with pytest.raises(UsageError, match="choose with `using`"):
            answers(setup.model)
        for rows in (["a", None], ["a", None, "b", "c"], ["a"] * 6):
            with attached.using(rows):
                for call in (lambda: setup.model(input_ids=PROMPTS), lambda: answers(setup.model)):
                    with pytest.raises(UsageError, match=f"names {len(rows)} rows and the batch has 3"):
                        call()
        with attached.using("a"), pytest.raises(UsageError, match="give the model `input_ids`"):
            setup.model(inputs_embeds=setup.model.get_input_embeddings()(PROMPTS))
        with (
            attached.using(["a", None, "b"]),
            pytest.raises(UsageError, match="names 3 rows and the batch has 6"),
        ):
            setup.model(input_ids=PROMPTS.repeat(2, 1))


def test_a_model_that_is_compiled_afterwards_answers_as_the_variants(setup: Setup) -> None:
    model = load_whole(setup.models.base)
    with peraxis.attach(model, setup.deltas) as attached, attached.using(["a", None, "b"]):
        want = logits_of(model)
        assert torch.equal(logits_of(torch.compile(model, backend="eager")), want)


def test_a_model_with_variants_is_not_copied(setup: Setup) -> None:
    with peraxis.attach(setup.model, setup.deltas["a"]) as attached:
        assert repr(attached) == "<Attached 'a'>"
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="neither copied nor pickled: detach them first"):
                make(setup.model)
    assert torch.equal(answers(copy.deepcopy(setup.model)), answers(setup.merged[None]))


@torch.inference_mode()
def test_a_model_that_was_moved_is_one_error(setup: Setup) -> None:
    model = load_whole(setup.models.base)
    with peraxis.attach(model, setup.deltas["a"]):
        model.to(torch.bfloat16)
        with pytest.raises(
            UsageError, match=r"it is on cpu in torch\.bfloat16 now: detach them, and attach again"
        ):
            model(input_ids=PROMPTS)


def attach_fails(kind: type[PeraxisError], reason: str, model: Any, *args: Any) -> str:
    """Check that attaching raises an error of one line, and that nothing is left of it."""
    with pytest.raises(kind, match=reason) as refused:
        peraxis.attach(model, *args)
    text = str(refused.value)
    assert "\n" not in text
    assert "--" not in text
    if isinstance(model, nn.Module):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert "forward" not in vars(model)
    return text


def test_an_artifact_of_another_base_is_refused_by_both_fingerprints(setup: Setup, tmp_path: Path) -> None:
    other = make_pair("llama", tmp_path, seed=9, changes=())
    with peraxis.open(setup.deltas["a"]) as opened:
        mine = opened.manifest.base_fingerprint[:12]
    foreign = load_whole(other.base)
    for arguments in ((setup.deltas["a"],), (setup.deltas, other.base)):
        text = attach_fails(BaseMismatch, mine, foreign, *arguments)
        assert len(re.findall(r"\([0-9a-f]{12}\)", text)) == 2
    # The right directory, and a model that is not loaded from it.
    attach_fails(BaseMismatch, "has other values than `model`", foreign, setup.deltas["a"], setup.models.base)
    attach_fails(CheckpointError, "no such directory", foreign, setup.deltas["a"], tmp_path / "gone")
    with torch.no_grad():
        # One number of one tensor.
        foreign = load_whole(setup.models.base)
        foreign.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    attach_fails(BaseMismatch, mine, foreign, setup.deltas["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_another_dtype_needs_its_directory(setup: Setup, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(setup.models.base, dtype=dtype).eval()
    attach_fails(BaseMismatch, "give the directory as `base`", model, setup.deltas["a"])
    plain = logits_of(model)
    with peraxis.attach(model, setup.deltas["a"], setup.models.base):
        got = logits_of(model).float()
    want = logits_of(setup.merged["a"].to(torch.float32))
    distance = (got - want)[MASK.bool()].norm() / want[MASK.bool()].norm()
    assert distance < 0.1 * (plain.float() - want)[MASK.bool()].norm() / want[MASK.bool()].norm()
    with torch.no_grad():
        model.model.norm.weight[7] += 0.5
    attach_fails(
        BaseMismatch, "'model.norm.weight' has other values", model, setup.deltas["a"], str(setup.models.base)
    )


def test_what_is_no_plain_model_is_refused(setup: Setup, tmp_path: Path) -> None:
    delta = setup.deltas["a"]
    attach_fails(UsageError, "`model` is a str: give a causal language model", "gpt2", delta)
    attach_fails(UsageError, "`model` is a Linear", nn.Linear(2, 2), delta)
    attach_fails(NotServable, "no linear output head", load_whole(setup.models.base).model, delta)
    compiled = load_whole(setup.models.base)
    compiled.compile(backend="eager")
    attach_fails(NotServable, "is compiled", compiled, delta)
    quantised = load_whole(setup.models.base)
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    attach_fails(NotServable, r"\('llama'\) is quantised|is quantised", quantised, delta)
    split = load_whole(setup.models.base)
    split.model.layers[1].to("meta")
    attach_fails(
        NotServable, r"`model` is on cpu, meta: load all of it on the CPU or on one CUDA device", split, delta
    )
    attach_fails(NotServable, "on meta", load_whole(setup.models.base).to("meta"), delta)
    adapted = load_whole(setup.models.base)
    from peft import LoraConfig

    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    attach_fails(NotServable, "has adapters of peft", adapted, delta)


@pytest.mark.parametrize("architecture", MERGED_ONLY)
def test_layers_that_no_delta_reaches_are_named(setup: Setup, architecture: str, tmp_path: Path) -> None:
    model = load_whole(make_pair(architecture, tmp_path, changes=()).base)
    attach_fails(NotServable, r"model\.layers\.0\.", model, setup.deltas["a"])


@pytest.mark.parametrize("content", [None, b"", b"no artifact", bytes(100)])
def test_a_file_that_is_no_artifact_is_one_error(setup: Setup, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    if content is not None:
        path.write_bytes(content)
    attach_fails(ArtifactError, re.escape(str(path)), setup.model, {"a": setup.deltas["a"], "b": path})
    attach_fails(UsageError, "`artifact` is empty", setup.model, {})


def test_a_buffer_that_layers_read_is_refused_by_name(tmp_path: Path) -> None:
    models = make_pair("apertus", tmp_path, changes=(Change(buffers=True),))
    delta = make_delta(models.base, models.finetunes[0], tmp_path / "delta.safetensors", method="both")
    model = load_whole(models.base)
    text = attach_fails(ArtifactError, r"it changes 'model\.layers\.0\.mlp\.act_fn\.beta'", model, delta)
    assert text.startswith(str(delta))


def test_a_variant_with_another_context_is_attached(tmp_path: Path) -> None:
    from tests.compressor.helpers.compressing import rewrite_config

    models = make_pair("llama", tmp_path, seed=5)
    rewrite_config(models.finetunes[0], max_position_embeddings=512)
    deltas = deltas_of(models)
    with peraxis.open(deltas["a"]) as opened:
        assert opened.manifest.config["max_position_embeddings"] == 512
    model, want = load_whole(models.base), merged(models.base, deltas["a"], tmp_path / "merged")
    with peraxis.attach(model, deltas["a"]):
        assert torch.equal(answers(model), answers(want))


@pytest.mark.parametrize("change", [Change(tied=False), Change(tied=True)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_was_tied_or_untied_is_the_variants(change: Change, tied: bool, tmp_path: Path) -> None:
    models = make_pair("llama", tmp_path, seed=4, changes=(change,), tie_word_embeddings=tied)
    deltas = deltas_of(models)
    model, want = load_whole(models.base), merged(models.base, deltas["a"], tmp_path / "merged")
    with peraxis.attach(model, deltas["a"]):
        torch.testing.assert_close(
            logits_of(model)[MASK.bool()], logits_of(want)[MASK.bool()], rtol=1e-4, atol=2e-4
        )
        assert torch.equal(answers(model), answers(want))


def test_the_example_prints_what_each_variant_writes(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    deltas = [str(setup.deltas[name]) for name in ("b", "a")]
    runpy.run_path(str(EXAMPLE))["main"](str(setup.models.base), "Hello", *deltas)
    ids = make_tokenizer()("Hello", return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    want = [
        setup.merged[name].generate(
            ids, attention_mask=mask, max_new_tokens=32, do_sample=False, pad_token_id=PAD
        )[0]
        for name in (None, "b", "a")
    ]
    texts = [make_tokenizer().decode(row, skip_special_tokens=True) for row in want]
    assert len(set(texts)) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{name}: {text!r}" for name, text in zip(("base", "b", "a"), texts, strict=True)]
