"""The rules of generation configs change logits as transformers' processors do, at a cost that no context changes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from server.engine.sampler import PromptHistory, Sampler
from server.protocol.messages import Submit, decode_client_message, encode
from server.protocol.request import Request, SamplingParams, token_ids_of
from server.protocol.rules import BiasTable, GenerationRules, ban_table, id_list
from server.text.generation_config import sampling_defaults
from tests.server.helpers.drawing import sample_one, walked

VOCAB_SIZE, NUM_NEW, EOS = 24, 30, (3, 5)
# Each alone changes some logits of a sequence below.
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "encoder_repetition": {"encoder_repetition_penalty": 1.7},
    "ngram_of_1": {"no_repeat_ngram_size": 1},
    "ngram_of_2": {"no_repeat_ngram_size": 2},
    "ngram_of_3": {"no_repeat_ngram_size": 3},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[1], [3], [2, 4], [7, 2, 4], [8, 2, 9], [3, 5], [1, 1, 1, 1, 1, 1, 9]]},
    "bias": {"sequence_bias": [[[2, 4], 3.3], [[6], -1.1], [[7, 2, 4], 0.7], [[9, 4], 1.3], [[2, 4], -2.7]]},
    "min_new_tokens": {"min_new_tokens": 7},
    "min_length": {"min_length": 16},
    "min_of_both": {"min_length": 30, "min_new_tokens": 2},
    "forced_bos": {"forced_bos_token_id": 8},
    "forced_eos": {"forced_eos_token_id": 9},
    "forced_of_several": {"forced_eos_token_id": [9, 3]},
    "decay": {"exponential_decay_length_penalty": [4, 1.2]},
    "suppress": {"suppress_tokens": [0, 5, 900, -1]},
    "begin_suppress": {"begin_suppress_tokens": [1, 2, 8]},
}
WARPERS: dict[str, dict[str, Any]] = {
    "default_top_k": {},
    "no_top_k": {"top_k": 0, "temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6, "temperature": 1.3},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.4},
    "typical": {"typical_p": 0.5},
    "epsilon": {"epsilon_cutoff": 0.05},
    "eta": {"eta_cutoff": 0.2},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model that only makes transformers' processors."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )


def processors(model: Any, config: dict[str, Any], prompt: tuple[int, ...]) -> Any:
    """Return what `generate` applies to the logits behind a prompt."""
    given = GenerationConfig(**{"eos_token_id": list(EOS), "max_new_tokens": NUM_NEW, **config})
    made, _ = model._prepare_generation_config(given)
    model._prepare_special_tokens(made, kwargs_has_attention_mask=True, device="cpu")
    model._prepare_generated_length(
        made,
        has_default_max_length=True,
        has_default_min_length="min_length" not in config,
        model_input_name="input_ids",
        input_ids_length=len(prompt),
        inputs_tensor=torch.tensor([prompt]),
    )
    return model._get_logits_processor(
        made,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([prompt]),
        device="cpu",
        model_kwargs={"attention_mask": torch.ones(1, len(prompt))},
    )


def params_of(config: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_new_tokens": NUM_NEW, **sampling_defaults(config), **more}, stop_token_ids=frozenset(EOS)
    )


def steps(chance: random.Random) -> Iterator[Tensor]:
    """Yield the logits of each token; a few are alike, so that n-grams repeat."""
    kinds = [torch.tensor([chance.gauss(0, 2) for _ in range(VOCAB_SIZE)]) for _ in range(3)]
    for _ in range(NUM_NEW):
        noise = torch.tensor([chance.gauss(0, 0.3) for _ in range(VOCAB_SIZE)])
        yield chance.choice(kinds) + noise


def num_changed(model: Any, config: dict[str, Any], prompt: tuple[int, ...], seed: int) -> int:
    """Compare each step of a sequence with transformers; return how many steps changed some logit."""
    sampler = Sampler(params_of(config, seed=seed), 0, PromptHistory(prompt))
    reference, tokens, changed = processors(model, config, prompt), list(prompt), 0
    # Usual warpers are the kernels' part of a draw.
    rules: Any = LogitsProcessorList(each for each in reference if not type(each).__name__.endswith("Warper"))
    for logits in steps(random.Random(seed)):
        try:
            want = reference(torch.tensor([tokens]), logits[None].clone())[0]
        except ValueError:
            # Rules that leave no token make NaN, which some warpers refuse.
            break
        if not want.isfinite().any():
            break
        if sampler.rules is not None:
            own = want if sampler.warpers else rules(torch.tensor([tokens]), logits[None].clone())[0]
            torch.testing.assert_close(sampler.scores(logits), own, rtol=0, atol=0)
        plan = sampler.plan(VOCAB_SIZE)
        drawn = sample_one(sampler, logits).token_id
        assert drawn == (int(want.argmax()) if sampler.greedy else walked(want.softmax(-1), plan.uniform))
        tokens.append(drawn)
        changed += not torch.equal(want, logits)
    return changed


@pytest.mark.parametrize("prompt", [(1,), (1, 2, 4, 7, 2, 4, 9, 1, 2)])
@pytest.mark.parametrize("name", [*RULES, *WARPERS])
def test_each_rule_alone_equals_transformers(name: str, prompt: tuple[int, ...], model: Any) -> None:
    config = RULES[name] if name in RULES else {"do_sample": True, **WARPERS[name]}
    changed = num_changed(model, config, prompt, seed=1)
    # More tokens than the vocabulary has, or fewer tokens than the rule is about.
    assert changed > 0 or name in ("default_top_k", "forced_bos", "encoder_ngram", "forced_eos")


@pytest.mark.parametrize("seed", range(40))
def test_rules_together_equal_transformers(seed: int, model: Any) -> None:
    chance = random.Random(seed)
    config = {"do_sample": seed % 2 == 0}
    for name in chance.sample(sorted(RULES), chance.randrange(2, 7)):
        config |= RULES[name]
    for name in chance.sample(sorted(WARPERS), chance.randrange(0, 4)):
        config |= WARPERS[name]
    prompt = tuple(chance.randrange(10) for _ in range(chance.randrange(1, 12)))
    num_changed(model, config, prompt, seed)


ALL = {key: value for name, config in RULES.items() for key, value in config.items() if name != "ngram_of_1"}


class LargestTensor(TorchDispatchMode):
    """Finds the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in made if isinstance(each, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


class CountedPrompt(tuple[int, ...]):
    """A prompt that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        CountedPrompt.num_read += len(found) if isinstance(found, tuple) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        CountedPrompt.num_read += len(self)
        return super().__iter__()


# n-grams alone are looked for in all tokens, in numpy.
WITHOUT_NGRAMS = {key: value for key, value in ALL.items() if "ngram" not in key}


@pytest.mark.parametrize(
    ("config", "reads_all"),
    [
        ({}, False),
        ({"do_sample": True}, False),
        ({**WITHOUT_NGRAMS, "do_sample": True}, False),
        ({**ALL, "do_sample": True}, True),
    ],
)
def test_a_token_costs_the_same_whatever_its_context(config: dict[str, Any], reads_all: bool) -> None:
    chance = random.Random(0)
    prompt = CountedPrompt(chance.randrange(VOCAB_SIZE) for _ in range(20_000))
    history = PromptHistory(prompt)
    params = params_of(config, max_new_tokens=1000, logprobs=1)
    samplers = [Sampler(params, index, history) for index in range(3)]
    logits = torch.arange(VOCAB_SIZE).float()
    # What a prompt needs is computed once, for all sequences of its request.
    sample_one(samplers[0], logits)
    CountedPrompt.num_read = 0
    with LargestTensor() as largest:
        for _ in range(5):
            for sampler in samplers:
                sample_one(sampler, logits)
    assert CountedPrompt.num_read == 0
    assert reads_all or largest.num_elements <= 2 * VOCAB_SIZE


def test_ngrams_are_found_across_the_end_of_the_prompt_and_behind_tokens_that_are_all_equal() -> None:
    params = params_of({"no_repeat_ngram_size": 3}, max_new_tokens=1000)
    sampler = Sampler(params, 0, PromptHistory((5, 1, 2)))
    logits = torch.arange(VOCAB_SIZE).float()
    for token_id in (7, 1, 2):
        sampler.add(token_id)
    assert (sampler.scores(logits) == -torch.inf).nonzero().flatten().tolist() == [7]
    same = Sampler(params, 0, PromptHistory([9] * 5000))
    assert (same.scores(logits) == -torch.inf).nonzero().flatten().tolist() == [9]


def constrained(rules: GenerationRules, allowed: set[int], **more: Any) -> int:
    """Return the token that a sequence takes whose response format allows some."""
    params = SamplingParams(
        temperature=0, stop_token_ids=frozenset(EOS), rules=rules, is_constrained=True, **more
    )
    logits = torch.arange(VOCAB_SIZE).float()
    logits[[token for token in range(VOCAB_SIZE) if token not in allowed]] = -torch.inf
    return sample_one(Sampler(params, 0, PromptHistory((1,))), logits).token_id


@pytest.mark.parametrize(
    ("rules", "allowed", "token"),
    [
        (GenerationRules(suppress_tokens=id_list([9])), {4, 9}, 4),
        (GenerationRules(suppress_tokens=id_list([4, 9])), {4, 9}, 9),
        (GenerationRules(forced_bos_token_id=4), {4, 9}, 4),
        (GenerationRules(forced_bos_token_id=7), {4, 9}, 9),
        (GenerationRules(forced_eos_token_id=id_list([3, 4])), {4, 9}, 4),
        (GenerationRules(min_new_tokens=3), {5}, 5),
        (GenerationRules(min_new_tokens=3), {4, 5}, 4),
        (GenerationRules(sequence_bias=BiasTable.of([([7], 100.0)])), {4, 9}, 9),
    ],
)
def test_a_response_format_wins_over_the_rules(rules: GenerationRules, allowed: set[int], token: int) -> None:
    assert constrained(rules, allowed, max_new_tokens=1) == token


def test_rules_that_leave_no_token_do_not_hold() -> None:
    rules = GenerationRules(suppress_tokens=id_list(range(VOCAB_SIZE)))
    params = SamplingParams(temperature=0, rules=rules)
    logits = torch.arange(VOCAB_SIZE).float()
    assert sample_one(Sampler(params, 0, PromptHistory((1,))), logits).token_id == VOCAB_SIZE - 1


def test_a_decay_beyond_all_numbers_ends_the_sequence() -> None:
    params = SamplingParams(
        max_new_tokens=2000,
        temperature=0.5,
        seed=0,
        stop_token_ids=frozenset(EOS),
        rules=GenerationRules(exponential_decay_length_penalty=(1, 100.0), no_repeat_ngram_size=2),
    )
    sampler = Sampler(params, 0, PromptHistory((1,)))
    drawn = [sample_one(sampler, torch.arange(VOCAB_SIZE).float()).token_id for _ in range(300)]
    assert set(EOS) & set(drawn)


def sequences(chance: random.Random) -> list[list[int]]:
    """Return sequences of few different tokens, so that some are behind each other and some equal."""
    return [
        [chance.randrange(3) for _ in range(chance.randrange(1, 6))] for _ in range(chance.randrange(1, 40))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_sequences_of_any_length_are_biased_and_banned_as_transformers_does(seed: int) -> None:
    chance = random.Random(seed)
    biases = [(ids, chance.uniform(-3, 3)) for ids in sequences(chance)]
    words, of_call = sequences(chance), sequences(chance)
    rules = GenerationRules(
        sequence_bias=BiasTable.of(biases),
        bad_words_ids=ban_table(words),
        bad_words=ban_table(of_call),
    )
    params = SamplingParams(max_new_tokens=100, rules=rules, stop_token_ids=frozenset({1}))
    prompt = tuple(chance.randrange(3) for _ in range(chance.randrange(1, 5)))
    sampler, tokens = Sampler(params, 0, PromptHistory(prompt)), list(prompt)
    processor = SequenceBiasLogitsProcessor([[ids, bias] for ids, bias in biases])
    reference: Any = LogitsProcessorList([processor])
    banned = [ids for ids in (*words, *of_call) if ids != [1]]
    if banned:
        reference.append(NoBadWordsLogitsProcessor(banned))
    for _ in range(30):
        logits = torch.tensor([chance.gauss(0, 2) for _ in range(VOCAB_SIZE)])
        want = reference(torch.tensor([tokens]), logits[None].clone())[0]
        torch.testing.assert_close(sampler.scores(logits), want, rtol=0, atol=0)
        tokens.append(chance.randrange(3))
        sampler.add(tokens[-1])


# As many as a generation config may hold.
MANY = 4096
LARGE_VOCAB = MANY + 1
LARGE: dict[str, GenerationRules] = {
    "suppressed": GenerationRules(suppress_tokens=id_list(range(MANY))),
    "banned": GenerationRules(bad_words_ids=ban_table([each] for each in range(MANY))),
    "banned behind another": GenerationRules(bad_words_ids=ban_table([7, each] for each in range(MANY))),
    "biased": GenerationRules(sequence_bias=BiasTable.of(([each], -1e9) for each in range(MANY))),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_found_beside_4096_others_that_must_not_come(name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, rules=LARGE[name])
    sampler = Sampler(params, 0, PromptHistory([7]))
    assert sample_one(sampler, torch.arange(LARGE_VOCAB).flip(0).float()).token_id == MANY


class Calls:
    """Counts the functions, of Python and of C, that are called in its block."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _: object, event: str, __: object) -> None:
        self.number += event in ("call", "c_call")


def num_calls(rules: GenerationRules) -> int:
    """Return how many functions are called from the message of a request to its first token."""
    params = SamplingParams(temperature=0.0, rules=rules)
    request = Request("id", "tenant", None, None, token_ids_of([5, 7]), LARGE_VOCAB, params)
    raw, logits = encode(Submit(request, 0.0)), torch.zeros(LARGE_VOCAB)
    with Calls() as calls:
        message = decode_client_message(raw)
        assert isinstance(message, Submit)
        prompt = PromptHistory(message.request.prompt_ids)
        sample_one(Sampler(message.request.sampling_params, 0, prompt), logits)
    return calls.number


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (GenerationRules(suppress_tokens=id_list([1])), LARGE["suppressed"]),
        (GenerationRules(bad_words_ids=ban_table([[1]])), LARGE["banned"]),
        (GenerationRules(bad_words_ids=ban_table([[7, 1]])), LARGE["banned behind another"]),
        (
            GenerationRules(sequence_bias=BiasTable.of([([7, 1], 1.0)])),
            GenerationRules(sequence_bias=BiasTable.of(([each, 1], 1.0) for each in range(MANY))),
        ),
    ],
)
def test_the_engine_makes_no_table_of_rules(few: GenerationRules, many: GenerationRules) -> None:
    """Its thread reads those that came with the request, so other tenants' rules, however many, change nothing."""
    num_calls(few)
    assert num_calls(many) == num_calls(few)


FLAT, PEAKED = 1.0, 0.02


@pytest.mark.parametrize("temperature", [FLAT, PEAKED])
@pytest.mark.parametrize(
    "config",
    [
        {"typical_p": 0.2}, {"typical_p": 0.9}, {"typical_p": 0.95, "top_p": 0.7}, {"typical_p": 0.9, "top_k": 40},
        {"eta_cutoff": 0.001, "top_p": 0.999}, {"epsilon_cutoff": 0.0003, "top_k": 3000}, {"top_h": 0.4, "top_k": 7},
        {"typical_p": 0.99, "min_p": 0.01}, {"typical_p": 0.999999},
    ],
    ids=str,
)  # fmt: skip
def test_rare_warpers_keep_what_those_of_transformers_keep_of_many_tokens(
    config: dict[str, Any], temperature: float, model: Any
) -> None:
    given = {"do_sample": True, "top_k": 0, "temperature": temperature, **config}
    reference = processors(model, given, (1,))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        # Some tokens are as likely as others, and some impossible.
        logits = torch.randn(5000, generator=generator)
        logits[1000:1100] = logits[:100]
        logits[2000:2100] = -torch.inf
        sampler = Sampler(params_of(given, seed=seed), 0, PromptHistory([1]))
        want = reference(torch.tensor([[1]]), logits[None].clone())[0]
        kept = (sampler.scores(logits) > -torch.inf).nonzero().flatten().tolist()
        # Where transformers' sort divides tokens that are as likely, all are kept.
        edge = {token for token in kept if want[token] == -torch.inf}
        assert {token for token in range(5000) if want[token] > -torch.inf} <= set(kept)
        assert len(edge) <= 1
