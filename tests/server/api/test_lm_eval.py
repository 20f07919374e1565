"""lm-evaluation-harness scores a variant over HTTP as it scores the merged checkpoint in its own process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.convert.merge import MergeConfig, merge
from tests.server.helpers.live_server import Artifacts, LiveServer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

NUM_DOCUMENTS = 24
BATCH_SIZE = 8
DATA = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
CHOICES = """
task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXTS = """
task: texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: bits_per_byte
"""
# As many tokens as the variant's own generation config allows, which transformers puts before lm-eval's length.
ANSWERS = """
task: answers
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: [" "]
  max_gen_toks: 5
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a model in one task, and its answer to each request."""

    scores: dict[str, float]
    responses: list[Any]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep data sets from the hub and from this machine's own cache."""
    config = import_module("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def merged(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Merged checkpoints by the names of their variants."""
    directory = tmp_path_factory.mktemp("merged")
    for name, artifact in (("plain", artifacts.plain), ("chatty", artifacts.chatty)):
        merge(MergeConfig(str(artifacts.base), artifact, directory / name, "float32"))
    return {name: directory / name for name in ("plain", "chatty")}


def documents() -> list[dict[str, Any]]:
    """Return questions with choices, and with answers that no model gives."""
    return [
        {
            "question": f"Is {n} + {n % 7} odd?",
            "choices": [" yes", " no", " perhaps"],
            "gold": n % 3,
            "answer": "-",
        }
        for n in range(NUM_DOCUMENTS)
    ]


def load(directory: Path, task: str, data: list[dict[str, Any]]) -> Any:
    """Write a task and its data, and load them."""
    directory.mkdir()
    lines = directory / "data.jsonl"
    lines.write_text("".join(json.dumps(document) + "\n" for document in data))
    path = directory / "task.yaml"
    path.write_text(task.lstrip() + DATA.format(data=lines))
    return import_module("lm_eval.tasks").TaskManager(include_defaults=False).load([str(path)])


def evaluate(model: Any, task: Any, **options: Any) -> Scored:
    found = import_module("lm_eval.evaluator").evaluate(model, task, bootstrap_iters=0, **options)
    (results,), (samples,) = found["results"].values(), found["samples"].values()
    scores = {key: value for key, value in results.items() if isinstance(value, float)}
    samples.sort(key=lambda sample: sample["doc_id"])
    return Scored(scores, [sample["resps"] for sample in samples])


def in_process(directory: Path) -> Any:
    """Return lm-eval's own model of a checkpoint."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wrapper = import_module("lm_eval.models.huggingface").HFLM
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return wrapper(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=BATCH_SIZE)


def over_http(server: LiveServer, variant: str, tokenizer: Path, num_concurrent: int = 1) -> Any:
    """Return lm-eval's client of `/v1/completions`; it sends lists of lists of token ids."""
    client = import_module("lm_eval.models.openai_completions").LocalCompletionsAPI
    return client(
        base_url=f"{server.url}/v1/completions",
        model=variant,
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        batch_size=BATCH_SIZE,
        num_concurrent=num_concurrent,
    )


def with_answers(responses: list[Any]) -> list[dict[str, Any]]:
    """Return the documents with the given answers to every other question."""
    return [
        {**document, "answer": response[0][0] if number % 2 else "-"}
        for number, (document, response) in enumerate(zip(documents(), responses, strict=True))
    ]


@pytest.mark.parametrize("num_concurrent", [1, 3])
@pytest.mark.parametrize("task", [CHOICES, TEXTS])
def test_log_likelihoods_are_those_of_the_merged_checkpoint(
    server: LiveServer, merged: dict[str, Path], tmp_path: Path, task: str, num_concurrent: int
) -> None:
    loaded = load(tmp_path / "task", task, documents())
    wanted = evaluate(in_process(merged["plain"]), loaded)
    found = evaluate(over_http(server, "plain", merged["plain"], num_concurrent), loaded)
    assert wanted.scores
    assert found.scores == pytest.approx(wanted.scores, abs=1e-3)
    for ours, theirs in zip(found.responses, wanted.responses, strict=True):
        for our, their in zip(ours, theirs, strict=True):
            assert our[0] == pytest.approx(their[0], abs=1e-3)


def test_generated_answers_are_those_of_the_merged_checkpoint(
    server: LiveServer, merged: dict[str, Path], tmp_path: Path
) -> None:
    model = in_process(merged["plain"])
    first = evaluate(model, load(tmp_path / "first", ANSWERS, documents()))
    loaded = load(tmp_path / "second", ANSWERS, with_answers(first.responses))
    wanted, found = evaluate(model, loaded), evaluate(over_http(server, "plain", merged["plain"]), loaded)
    assert wanted.scores["exact_match,none"] == 0.5
    assert found.scores == wanted.scores
    assert found.responses == wanted.responses


def test_chats_are_answered_as_by_the_merged_checkpoint(
    server: LiveServer, merged: dict[str, Path], tmp_path: Path
) -> None:
    model = in_process(merged["chatty"])
    client = import_module("lm_eval.models.openai_completions").LocalChatCompletion
    chat = client(base_url=f"{server.url}/v1/chat/completions", model="chatty", eos_string="</s>")
    loaded = load(tmp_path / "first", ANSWERS, documents())
    first = evaluate(model, loaded, apply_chat_template=True)
    loaded = load(tmp_path / "second", ANSWERS, with_answers(first.responses))
    wanted = evaluate(model, loaded, apply_chat_template=True)
    found = evaluate(chat, loaded, apply_chat_template=True)
    assert wanted.scores["exact_match,none"] == 0.5
    assert found.scores == wanted.scores
    assert found.responses == wanted.responses
