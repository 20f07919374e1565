"""Pairs with two or three faults at once: the model that transformers loads from the fine-tune, or one line of error.

The difference of each pair is one bit per weight and is coded exactly, so that every other result is a fault.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from compressor.config import CompressConfig
from compressor.convert.merge import MergeConfig, merge
from compressor.pipeline import compress
from compressor.sources import FREE_GENERATION, TOKEN_IDS
from deltastore.errors import CheckpointError, PeraxisError, failures_as
from server.publishing.checks import check_tensors
from tests.compressor.helpers.faults import FAULTS, GENERATION, TOKENIZER, Fault, Form, applied, exact_pair
from tests.helpers.tiny_models import VOCAB_SIZE
from tests.server.helpers.served import serving

FAMILIES = ("llama", "qwen2", "gemma", "gpt_neox", "mistral")
SIDES = ("finetune", "finetune", "base", "both")
KINDS = sorted(FAULTS)
NUM_CASES = int(os.environ.get("TESTS_PAIRS", "30"))  # the same ones in every run
PROMPT = [(7 + 37 * place) % VOCAB_SIZE for place in range(14)]
TEXTS = ("ab c\n", "<s>A probe: 1 + 2</s><pad>", "\u00e9\u4e2d")
CHAT = [{"role": "user", "content": "Hi"}]
KNOWN = {*CONFIG_MAPPING}
TOLERANCE = 1e-4  # of log probabilities that two implementations compute in float32


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Form, Form]]:
    return {family: exact_pair(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@dataclass(frozen=True, slots=True)
class Case:
    """A pair and what is wrong with it."""

    family: str
    base: tuple[Fault, ...]
    finetune: tuple[Fault, ...]
    embeddings: str

    @property
    def is_harmless(self) -> bool:
        return all(fault.is_harmless for fault in (*self.base, *self.finetune))


def of_different_places(faults: Sequence[tuple[str, Fault]]) -> bool:
    """True if no two faults of a side are of one place."""
    places = [
        (each, fault.place)
        for side, fault in faults
        for each in (("base", "finetune") if side == "both" else (side,))
        if fault.place
    ]
    return len(set(places)) == len(places)


def drawn_case(source: Random) -> Case:
    """Return a pair of random family with two or three random faults."""
    family = source.choice(FAMILIES)
    faults: list[tuple[str, Fault]] = []
    wanted = source.choice((2, 3))
    while len(faults) < wanted:
        drawn = (source.choice(SIDES), source.choice(FAULTS[source.choice(KINDS)]))
        if of_different_places([*faults, drawn]):
            faults.append(drawn)
    base = tuple(fault for side, fault in faults if side in ("base", "both"))
    finetune = tuple(fault for side, fault in faults if side in ("finetune", "both"))
    has_new_ends = any(fault.place in ("ends", "rows") for fault in (*base, *finetune))
    # A head of its own against the base's embedding is no difference of one bit.
    embeddings = "whole" if has_new_ends else source.choice(("whole", "compress"))
    return Case(family, base, finetune, embeddings)


@torch.inference_mode()
def log_probs(directory: Path) -> Tensor | None:
    """Return ``[tokens, vocabulary]`` of the model that transformers loads; None if it does not find all of it."""
    try:
        with failures_as(CheckpointError):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
            )
            model, info = loaded
            scores: Tensor = model.eval()(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    except CheckpointError:
        return None
    is_whole = not info["missing_keys"] and not info["mismatched_keys"]
    return scores if is_whole and scores.isfinite().all() else None


def refusal_of(work: Callable[[], object]) -> str | None:
    """Return the line with which work ends, or None if it is done. Any error but one line fails the test."""
    try:
        work()
    except PeraxisError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line
    return line


def expected(form: Form, faults: Sequence[Fault], directory: Path) -> Tensor | None:
    """Return what a side means: what transformers loads, with spellings undone if it cannot read them."""
    applied(form, [*faults]).write(directory)
    found = log_probs(directory)
    if found is not None:
        return found
    meant = applied(form, [*faults], spelled=False)
    # Tied ends may be stored as the head alone.
    table = meant.tensors.get(meant.embedding, meant.tensors.get(meant.head))
    rows = len(table) if table is not None and table.dim() else 0
    if directory.name == "finetune":
        # A delta has the rows of the tensors, whatever the fine-tune's configuration says.
        meant.config["vocab_size"] = rows
    if not is_id(meant.config.get("pad_token_id"), rows):
        # No logit depends on it.
        meant.config["pad_token_id"] = None
    plain = directory.with_name(f"{directory.name}-meant")
    meant.write(plain)
    return log_probs(plain)


def check(case: Case, pair: tuple[Form, Form], directory: Path) -> str:
    """Compress a pair with faults and compare what comes of it; return "refused" or "equal"."""
    base, finetune = directory / "base", directory / "finetune"
    of_base = expected(pair[0], case.base, base)
    of_finetune = expected(pair[1], case.finetune, finetune)
    out, merged = directory / "delta", directory / "merged"
    config: dict[str, Any] = {"embeddings": case.embeddings}
    refusal = refusal_of(lambda: compress(CompressConfig(str(base), str(finetune), out, **config)))
    if refusal is not None:
        assert not list(directory.glob("delta*")), "a refused pair leaves files"
        assert not case.is_harmless, f"refused: {refusal}"
        return "refused"
    if not all(
        json.loads((side / "config.json").read_text()).get("model_type") in KNOWN for side in (base, finetune)
    ):
        # Models that transformers does not know are compressed, and there is nothing to compare them with.
        return "unknown"
    assert of_base is not None, "transformers loads no base"
    assert of_finetune is not None, "transformers loads no fine-tune"
    merge(MergeConfig(str(base), out, merged, "float32"))
    of_merged = log_probs(merged)
    assert of_merged is not None, "transformers loads no merged model"
    assert_equal(of_merged, of_finetune, "merged")
    check_files(base, finetune, merged)
    refusal = refusal_of(lambda: check_served(base, directory / "registry", out, (of_base, of_finetune)))
    if refusal is not None:
        # A base with tensors that no parameter takes, or with code of attention that is not there, is not served.
        has_more = any("more" in fault.name or "attn_impl" in fault.name for fault in case.base)
        assert not case.is_harmless or has_more, f"not served: {refusal}"
        return "not served"
    return "equal"


def assert_equal(actual: Tensor, wanted: Tensor, what: str) -> None:
    assert actual.shape == wanted.shape, what
    assert torch.allclose(actual, wanted, atol=TOLERANCE), f"{what}: {float((actual - wanted).abs().max())}"


def check_served(base: Path, registry: Path, delta: Path, wanted: tuple[Tensor, Tensor]) -> None:
    """Compare the log probabilities of the likeliest tokens at each place of a prompt, of base and variant."""
    with serving(base, registry, slot_headroom=16.0) as served:
        facts = served.engine.facts
        check_tensors(delta, facts.base, facts.slot_bytes, facts.unread)
        for record, scores in zip((None, served.publish(delta, "variant")), wanted, strict=True):
            answer = served.ask(record, PROMPT, max_new_tokens=1, prompt_logprobs=20, logprobs=20)
            prompt, token = answer.events[:2]
            tops = [*(scored.top for scored in prompt.tokens), token.top]  # type: ignore[union-attr]
            assert len(tops) == len(PROMPT)
            for place, top in enumerate(tops):
                for token_id, value in top:
                    assert abs(value - float(scores[place, token_id])) < TOLERANCE, "served"
                assert abs(top[0][1] - float(scores[place].max())) < TOLERANCE, "served"


def check_files(base: Path, finetune: Path, merged: Path) -> None:
    """Compare tokenizer, templates and generation config with those that transformers loads from the fine-tune."""
    own = tokenizer_facts(finetune, base)
    if own is not None:
        assert tokenizer_facts(merged, merged) == own
    generation = finetune / GENERATION
    if not generation.is_file():
        return
    config = json.loads((merged / "config.json").read_text())
    rows = config["vocab_size"]
    # Ids of the configuration hold where there is no file.
    written = json.loads((merged / GENERATION).read_text()) if (merged / GENERATION).is_file() else config
    for key, value in json.loads(generation.read_text()).items():
        if key in FREE_GENERATION:
            # A file with no others is none.
            continue
        if key not in TOKEN_IDS:
            assert written.get(key) == value, key
        elif usable := [
            each for each in (value if isinstance(value, list) else [value]) if is_id(each, rows)
        ]:
            assert written[key] in (usable, usable[0]), key
        else:
            # 257.0 is 257, and is the base's.
            assert written.get(key) is None or (type(value) is float and written[key] == value), key


def is_id(value: Any, rows: int) -> bool:
    return type(value) is int and 0 <= value < rows


def tokenizer_facts(directory: Path, base: Path) -> Any:
    """Return what a tokenizer makes of texts, completed by the base's files; None if transformers loads none."""
    with tempfile.TemporaryDirectory() as scratch:
        for source in (base, directory) if not (directory / TOKENIZER).is_file() else (directory,):
            for path in source.rglob("*"):
                if path.suffix in (".json", ".jinja") and not path.name.startswith(("model.", GENERATION)):
                    target = Path(scratch) / path.relative_to(source)
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(path.read_bytes())
        try:
            with failures_as(CheckpointError):
                tokenizer = AutoTokenizer.from_pretrained(scratch)
                ids = [tokenizer(text)["input_ids"] for text in TEXTS]
                template = tokenizer.chat_template
                chat = None if template is None else tokenizer.apply_chat_template(CHAT, tokenize=False)
        except CheckpointError:
            return None
        # transformers makes a tokenizer of nothing where it finds no vocabulary.
        if not ids[0]:
            return None
        return ids, tokenizer.special_tokens_map, template, chat


@contextmanager
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_an_exact_pair_is_coded_without_a_loss(pairs: dict[str, tuple[Form, Form]], tmp_path: Path) -> None:
    for family in FAMILIES:
        for embeddings in ("whole", "compress"):
            directory = tmp_path / f"{family}-{embeddings}"
            directory.mkdir()
            assert check(Case(family, (), (), embeddings), pairs[family], directory) == "equal"


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_faults_give_the_model_that_transformers_loads_or_one_line(
    number: int, pairs: dict[str, tuple[Form, Form]], tmp_path: Path
) -> None:
    case = drawn_case(Random(number))
    with one_thread():
        check(case, pairs[case.family], tmp_path)


@pytest.mark.deploy
# A case is made of many numbers, whatever they are.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.large_base_example])
@given(source=st.randoms(use_true_random=False))
def test_other_faults_do_too(source: Random, pairs: dict[str, tuple[Form, Form]]) -> None:
    case = drawn_case(source)
    note(repr(case))
    with tempfile.TemporaryDirectory() as scratch, one_thread():
        check(case, pairs[case.family], Path(scratch))
