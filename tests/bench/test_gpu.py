"""Run the GPU bench on the CPU, check its requirements, and that its steps can be captured as graphs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu import SectionRunner, main
from bench.gpu_model import FULL, SMALL, Blueprint, Rows, blueprint, build_model, fill
from bench.gpu_sections import StepBench, attention_errors, write_delta
from deltastore.format.sizes import one_bit_plan
from server.kernels import attention_cuda
from server.model import attention
from tests.bench.helpers.without_numba import ABSENT

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique"}


def drawing_of(model: torch.nn.Module) -> Blueprint:
    return blueprint({name: tuple(value.shape) for name, value in model.named_parameters()})


@pytest.mark.deploy
def test_a_small_run_needs_no_numba_and_fills_the_table(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "tests.bench.helpers.without_numba",
        "--small",
        "--device",
        "cpu",
        "--dir",
        str(tmp_path),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = {(row["section"], row["name"]) for row in json.loads(out.read_text())["results"]}
    missing = [row.name for row in Rows(SMALL) if (row.section, row.name) not in measured]
    assert missing == ["paged attention", "paged attention, bf16"]
    assert not [name for name in ABSENT if name in done.stderr]
    assert str(tmp_path) not in done.stdout
    assert "TINY" in done.stdout


def test_wheels_are_all_that_a_gpu_image_lacks_but_numba() -> None:
    in_image = {"torch", "transformers", "huggingface-hub", "safetensors", "numpy", "jinja2"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]}
    (wheels,) = re.findall("^WHEELS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(wheels.split()) == required - in_image - {"numba"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_every_row_says_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert main(["--out", str(out)]) == 0
    assert json.loads(out.read_text())["results"] == []
    assert capsys.readouterr().out.count("not measured") == len(list(Rows(FULL)))


def test_a_section_that_fails_says_why_and_leaves_the_others_alone() -> None:
    run = SectionRunner(Rows(SMALL), minutes=1)

    def fails() -> None:
        run.rows.put("fit", "slot", 1.0)
        raise RuntimeError("no memory\nand more")

    run.section(["fit"], fails)
    rows = {row.name: row for row in run.rows if row.section == "fit"}
    assert rows["slot"].value == 1.0
    assert rows["variants resident beside base and cache"].note == "RuntimeError: no memory"


def test_a_section_that_comes_too_late_is_not_begun() -> None:
    run = SectionRunner(Rows(SMALL), minutes=0)
    run.section(["prefill"], lambda: pytest.fail("begun"))
    assert {row.note for row in run.rows if row.section == "prefill"} == {"out of time"}


def test_a_wrong_kernel_makes_the_run_fail() -> None:
    rows = Rows(SMALL)
    rows.put("kernels", "sign product", 0.5, met=True)
    assert not rows.is_wrong
    rows.put("kernels", "embedding rows", 2.0, met=False)
    assert rows.is_wrong


def test_the_kernels_of_attention_are_right_where_the_bench_looks() -> None:
    assert max(attention_errors(torch.bfloat16, CPU, (1, 37))) < 1


def test_a_delta_of_the_full_size_has_the_bytes_of_the_plan() -> None:
    with torch.device("meta"):
        model = build_model(FULL, torch.device("meta"))
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    drawing = blueprint(shapes)
    assert drawing.device_bytes == one_bit_plan(shapes).device_bytes
    assert 1.00e9 < drawing.device_bytes < 1.02e9


def test_the_stock_library_opens_a_synthetic_delta(tmp_path: Path) -> None:
    drawing = drawing_of(build_model(SMALL, CPU))
    memory = torch.empty(drawing.device_bytes, dtype=torch.uint8)
    fill(memory, drawing, seed=0)
    source = write_delta(tmp_path / "delta.safetensors", drawing, memory)
    assert source.data_end == source.size_bytes
    with safe_open(source.path, "pt") as file:
        signs = file.get_tensor("lm_head.weight.signs")
    entry = drawing.header.tensors["lm_head.weight.signs"]
    assert torch.equal(signs.flatten(), memory[entry.start : entry.end])


class Calls(TorchDispatchMode):
    """Counts operators that reach the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_variants", [0, 2])
def test_a_repeated_step_never_waits_for_the_device(
    num_variants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies between host and device would make a CUDA graph impossible."""
    launched: list[Callable[..., None]] = []
    monkeypatch.setattr(attention_cuda, "_launch", lambda *args: launched.append(args[0]))
    monkeypatch.setattr(attention, "_single_token_kernel", lambda kind: attention_cuda)
    with torch.no_grad():
        stage = StepBench(build_model(SMALL, CPU), SMALL, CPU, Rows(SMALL))
        drawing = drawing_of(stage.model)
        stage.page()
        stage.fit(drawing)
        with torch.inference_mode(), stage._decoding(4, num_variants) as step:
            step()
            launched.clear()
            with Calls() as calls:
                step()
    assert len(launched) == SMALL.layers
    assert calls.names["linear"] == 7 * SMALL.layers + 1
    assert not WAITING & set(calls.names)
