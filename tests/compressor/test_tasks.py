"""Tasks of lm-evaluation-harness in `peraxis eval`: local task files run offline, and one line where none can."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.convert.merge import MergeConfig, merge
from compressor.tasks import PAPER, Tasks
from deltastore.errors import UsageError
from peraxis.cli import run
from tests.compressor.helpers.decoders import whole_model
from tests.compressor.helpers.evaluating import Evaluated, document, make_evaluated
from tests.helpers.tiny_models import make_tokenizer

Captured = pytest.CaptureFixture[str]
NEEDS = "lm-evaluation-harness is not installed: pip install 'peraxis[eval]'"
CHOICES = (" yes", " no", " maybe")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def harness() -> None:
    pytest.importorskip("lm_eval", reason=NEEDS)
    pytest.importorskip("accelerate", reason=NEEDS)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return make_evaluated(tmp_path_factory.mktemp("evaluated"), noise=1.5)


@pytest.fixture
def offline(harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the hub nor this machine's own cache of data sets."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def task_manager(harness: None) -> Callable[..., Any]:
    """lm_eval's TaskManager, made once by the first test that asks for it: it reads the files of all its tasks."""
    from lm_eval.tasks import TaskManager

    return cache(TaskManager)


@pytest.fixture
def indexed_once(task_manager: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", task_manager)


def questions() -> list[dict[str, object]]:
    return [
        {"question": f"Is {number} times {number % 7} odd?", "choices": list(CHOICES), "gold": number % 3}
        for number in range(40)
    ]


def write_task(directory: Path, name: str = "oddness", text: str = TASK) -> Path:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in questions()))
    path = directory / f"{name}.yaml"
    path.write_text(text.format(name=name, data=data))
    return path


def accuracy(directory: Path) -> float:
    """Return the accuracy of the choice that a whole model finds most likely."""
    model, tokenizer, right = whole_model(directory), make_tokenizer(), 0
    for record in questions():
        scores = []
        for choice in CHOICES:
            context = tokenizer(str(record["question"]))["input_ids"]
            answer = tokenizer(choice)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([context + answer])).logits[0].log_softmax(-1)
            scores.append(sum(float(logits[len(context) - 1 + i, token]) for i, token in enumerate(answer)))
        right += scores.index(max(scores)) == record["gold"]
    return right / len(questions())


def test_base_finetune_and_delta_are_scored_on_a_local_task(
    evaluated: Evaluated, offline: None, tmp_path: Path, capsys: Captured
) -> None:
    result = document(evaluated.args(tasks=write_task(tmp_path)), capsys)
    merge(MergeConfig(str(evaluated.models.base), evaluated.delta, tmp_path / "merged"))
    scores = {model: metrics["acc"] for model, metrics in result["tasks"]["oddness"].items()}
    assert scores == {
        "base": accuracy(evaluated.models.base),
        "finetune": accuracy(evaluated.models.finetunes[0]),
        "delta": accuracy(tmp_path / "merged"),
    }
    assert len(set(scores.values())) > 1


def test_each_task_has_its_column(
    evaluated: Evaluated, offline: None, tmp_path: Path, capsys: Captured
) -> None:
    tasks = ",".join(str(write_task(tmp_path, name)) for name in ("first", "second"))
    assert run([*evaluated.args(tasks=tasks), "--no-progress"]) == 0
    head, base, finetune, delta = capsys.readouterr().out.splitlines()[:4]
    assert head.split()[-4:] == ["first", "(acc)", "second", "(acc)"]
    for line, directory in ((base, evaluated.models.base), (finetune, evaluated.models.finetunes[0])):
        assert line.split()[-2:] == [f"{accuracy(directory):.4f}"] * 2
    assert len(delta.split()) == 7


def test_a_task_is_zero_shot_whatever_its_file_says(offline: None, tmp_path: Path) -> None:
    path = write_task(tmp_path, text=TASK + "num_fewshot: 5\n")
    task = Tasks.load([str(path)]).loaded["tasks"]["oddness"]
    assert task.get_config("num_fewshot") == 0


def test_the_normalised_accuracy_is_the_one_that_is_quoted(
    evaluated: Evaluated, offline: None, tmp_path: Path
) -> None:
    path = write_task(
        tmp_path, text=TASK + "  - metric: acc_norm\n    aggregation: mean\n    higher_is_better: true\n"
    )
    score = Tasks.load([str(path)]).score(evaluated.models.base)["oddness"]
    assert (score.metric, score.value) == ("acc_norm", score.metrics["acc_norm"])
    assert score.metrics["acc"] == accuracy(evaluated.models.base)
    assert 0 < score.metrics["acc_stderr"] < 0.2


def test_the_paper_s_tasks_are_known_to_the_harness(harness: None) -> None:
    folders = {"arc_challenge": "arc", "arc_easy": "arc", "winogrande": "winogrande"}
    import lm_eval

    tasks = Path(lm_eval.__file__).parent / "tasks"
    for name in PAPER:
        files = (tasks / folders.get(name, name)).glob("*.yaml")
        assert any(f"task: {name}\n" in path.read_text() for path in files), name


def test_a_task_of_the_hub_without_a_network_is_one_line(
    evaluated: Evaluated, offline: None, indexed_once: None, capsys: Captured
) -> None:
    message = document(evaluated.args(tasks="paper"), capsys, code=2)["error"]["message"]
    assert message.startswith(
        "--tasks arc_challenge: it cannot be loaded (ConnectionError: Couldn't reach 'allenai/ai2_arc'"
    )
    assert message.endswith("try again where the hub is reachable, or give a .yaml file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "while parsing a flow node"),
        ("nothing: here", "Unknown config shape"),
        ("- a\n- b", "Expected YAML dict"),
        (TASK.replace("{data}", "{data}.gone"), "Unable to find"),
        (TASK + "surprise: 1\n", "surprise"),
    ],
)
def test_a_task_file_that_is_none_is_one_line(
    text: str, message: str, evaluated: Evaluated, offline: None, tmp_path: Path, capsys: Captured
) -> None:
    path = write_task(tmp_path, text=text)
    error = document(evaluated.args(tasks=path), capsys, code=2)["error"]["message"]
    assert error.startswith(f"--tasks {path}: it cannot be loaded (")
    assert message in error
    assert error.endswith("correct the file")


def test_a_task_that_does_not_fit_its_data_is_one_line(
    evaluated: Evaluated, offline: None, tmp_path: Path, capsys: Captured
) -> None:
    path = write_task(tmp_path, text=TASK.replace("{{{{gold}}}}", "{{{{gold.missing.twice}}}}"))
    assert "oddness" in document(evaluated.args(tasks=path), capsys, code=2)["error"]["message"]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("gone.yaml", "--tasks gone.yaml: no such file"),
        ("arc_esy", "--tasks arc_esy: lm-evaluation-harness has no"),
    ],
)
def test_a_task_that_is_not_there_is_one_line(
    tasks: str,
    message: str,
    evaluated: Evaluated,
    offline: None,
    indexed_once: None,
    capsys: Captured,
) -> None:
    assert message in document(evaluated.args(tasks=tasks), capsys, code=2)["error"]["message"]


def test_without_the_harness_its_extra_is_named(
    evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # what makes an import fail
    assert run([*evaluated.args(tasks="paper"), "--no-progress"]) == 2
    assert capsys.readouterr().err.endswith("pip install 'peraxis[eval]'\n")
    with pytest.raises(UsageError, match=r"`tasks` needs lm-evaluation-harness"):
        Tasks.load(["paper"])
