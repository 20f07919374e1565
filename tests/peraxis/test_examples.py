"""The programs in examples/ that talk to a server, the notebook, and the code in docs/python.md do what they say."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peraxis
from tests.helpers.debian import missing_package
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, load_whole, make_pair, make_tokenizer
from tests.server.helpers.live_server import LiveServer, live_server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
NOTEBOOK = ROOT / "examples" / "layer_errors.ipynb"
# Appended to the notebook.
PROBE = "import json, sys\nprint(json.dumps([sys.executable, ids.tolist(), errors]))"
# On a loaded machine a kernel starts, and its outputs come, later than nbclient waits by default; it then drops them.
WAITING: dict[str, Any] = {"startup_timeout": 600, "iopub_timeout": 600, "raise_on_iopub_timeout": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A base and two fine-tunes with a chat template."""
    changes = (Change(chat_template=CHAT_TEMPLATE, noise=0.2),) * 2
    made = make_pair("llama", tmp_path_factory.mktemp("models"), changes=changes)
    make_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(made.base)
    return made


@pytest.fixture(scope="module")
def server(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Run a server of the base for the tests of this file, each of which uses a variant name of its own."""
    with live_server(models.base, tmp_path_factory.mktemp("served") / "registry") as running:
        yield running


def ran(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command: list[str] = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_here(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    """Run a program in this process; SystemExit holds what it would end with."""
    program = str(ROOT / "examples" / name)
    monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
    runpy.run_path(program, run_name="__main__")


def test_a_pipeline_publishes_what_is_near_enough_and_nothing_else(
    models: TinyModels,
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = versions(server)
    assert "published" not in before
    pair = models.base, models.finetunes[0], "published", server.url
    with pytest.raises(SystemExit, match=r"\Anot published: .*min_agreement.*\Z"):
        run_here(monkeypatch, "publish.py", *pair, 1.0, 4)
    assert versions(server) == before

    published = ran("publish.py", *pair, 0.0, 4)
    assert (published.returncode, published.stderr) == (0, "")
    assert published.stdout.splitlines()[-1] == "published answers as version 1"
    assert versions(server) == {**before, "published": 1}

    compared = ran("compare.py", server.url, "published", "base", "Hello", "One two")
    assert (compared.returncode, compared.stderr) == (0, "")
    assert [line for line in compared.stdout.splitlines() if line.startswith(("'Hello'", "'One two'"))]
    assert "  published: " in compared.stdout
    capsys.readouterr()
    run_here(monkeypatch, "compare.py", server.url, "published", "published@1", "Hello")
    same = capsys.readouterr().out
    assert same.startswith("'Hello': ")
    assert "  published" not in same


def versions(server: LiveServer) -> dict[str, int | None]:
    """Return the active version of each variant."""
    return {
        variant["name"]: variant["active"] for variant in server.client.get("/variants").json()["variants"]
    }


def test_the_pages_code_runs_in_its_order(
    models: TinyModels,
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for link, target in (("base", models.base), ("my-finetune", models.finetunes[0])):
        (tmp_path / link).symlink_to(target)
    better = tmp_path / "better.safetensors"
    peraxis.compress(models.base, models.finetunes[1], better, calibration="none").close()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("http://localhost:8000", server.url), names)
    assert [each["version"] for each in server.client.get("/variants/my").json()["versions"]] == [1]
    assert "<Artifact my.safetensors: " in capsys.readouterr().out


def test_the_notebook_shows_the_error_of_each_matrix_of_the_merged_checkpoint(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, cells = executed(models, tmp_path, monkeypatch)
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    of_base, of_delta = (
        float(text.partition(f"{whose} ")[2].split(",")[0].split()[0]) for whose in ("base's", "delta's")
    )
    assert 0 < of_delta < of_base
    assert "the worst matrix is " in text
    interpreter, ids, errors = json.loads(text.splitlines()[-1])
    assert Path(interpreter) == Path(sys.executable)

    found = {f"{layer}.{name}": error for layer, row in errors.items() for name, error in row.items()}
    peraxis.merge(models.base, document, tmp_path / "merged", dtype="float32")
    assert found == pytest.approx(matrix_errors(models, tmp_path / "merged", torch.tensor(ids)), abs=1e-4)

    shown = [output.data["text/html"] for cell in cells for output in cell.outputs if "data" in output]
    assert "<svg" in shown[0]
    assert shown[1].count("<td ") == len(found) > 6


def executed(models: TinyModels, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Any]]:
    """Run the notebook with a probe beside the files that it names; return the delta and the cells."""
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError:
        missing_package("nbclient")
    names = {"base": models.base, "my-finetune": models.finetunes[0]}
    for name, path in names.items():
        (directory / name).symlink_to(path)
    delta = peraxis.compress(
        models.base, models.finetunes[0], directory / "my.safetensors", calibration="none"
    )
    delta.close()
    # No kernel of the user's in place of this interpreter's.
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(directory / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(notebook))
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    NotebookClient(notebook, resources={"metadata": {"path": str(directory)}}, **WAITING).execute()
    return delta.path, code_cells(notebook)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@torch.inference_mode()
def matrix_errors(models: TinyModels, merged: Path, ids: torch.Tensor) -> dict[str, float]:
    """Return each matrix' output error on its inputs in the fine-tune, as a share of the base's, from the weights."""
    base, finetune, delta = (
        {name: each for name, each in load_whole(path).named_modules() if isinstance(each, nn.Linear)}
        for path in (models.base, models.finetunes[0], merged)
    )
    inputs: dict[str, torch.Tensor] = {}
    model = load_whole(models.finetunes[0])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, output, name=name: inputs.__setitem__(name, args[0]))
    model(ids)
    errors = {}
    for name, x in inputs.items():
        if ".layers." in name:
            wanted = finetune[name](x)
            gap = (base[name](x) - wanted).norm()
            errors[name.partition(".layers.")[2]] = float((delta[name](x) - wanted).norm() / gap)
    return errors
