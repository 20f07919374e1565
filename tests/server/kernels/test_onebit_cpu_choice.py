"""The choice of kernels is measured once per machine, kept in the user's cache, and measured again if it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltastore.user_cache import CacheDirectory
from server.kernels import vectors
from server.kernels.onebit_cpu import NEVER, ROWS, Choice, half_rows

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor"
)


class Product:
    """A product that does nothing, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, output: Tensor, *arguments: Any) -> None:
        self.num_calls += 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "peraxis" / "choices"


def only_file(cache: Path) -> Path:
    (found,) = cache.iterdir()
    return found


def test_a_product_that_takes_no_time_is_never_replaced() -> None:
    assert half_rows([64, 9], Product()) == {64: NEVER, 9: NEVER}


def test_a_slow_product_is_replaced_from_the_fewest_rows_on() -> None:
    def slow(output: Tensor, *arguments: Any) -> None:
        for _ in range(3):
            torch.randn(2048, 2048)

    assert half_rows([64], slow) == {64: ROWS[0]}


def test_a_second_process_does_not_measure(cache: Path) -> None:
    half_rows([64], Product())
    later = Product()
    assert half_rows([64], later) == {64: NEVER}
    assert later.num_calls == 0


def test_only_inputs_that_are_not_known_are_measured(cache: Path) -> None:
    first, both = Product(), Product()
    half_rows([64], first)
    half_rows([64, 128], both)
    assert both.num_calls == first.num_calls
    assert half_rows([128, 64], later := Product()).keys() == {64, 128}
    assert later.num_calls == 0


def test_a_damaged_file_is_measured_again(cache: Path) -> None:
    half_rows([64], Product())
    only_file(cache).write_bytes(b"damaged")
    again = Product()
    assert half_rows([64], again) == {64: NEVER}
    assert again.num_calls > 0
    assert half_rows([64], later := Product()) == {64: NEVER}
    assert later.num_calls == 0


@pytest.mark.parametrize("content", ["[1]", '{"a": 1}', '{"64": null}', "7", "\\xff"])
def test_content_of_another_form_is_measured_again(content: str, cache: Path) -> None:
    half_rows([64], Product())
    name = only_file(cache).name
    CacheDirectory(cache).write(name, content.encode())
    assert half_rows([64], Product()) == {64: NEVER}


def test_a_cache_that_cannot_be_written_does_not_matter(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert half_rows([64], Product()) == {64: NEVER}


def test_another_number_of_threads_is_measured_for_itself(cache: Path) -> None:
    before = torch.get_num_threads()
    half_rows([64], Product())
    try:
        torch.set_num_threads(before + 1)
        half_rows([64], other := Product())
    finally:
        torch.set_num_threads(before)
    assert other.num_calls > 0


@pytest.mark.skipif(not vectors.supports_lookup(), reason="this processor has no AVX-512")
def test_the_choice_is_of_inputs_and_dtype() -> None:
    choice = Choice(by_lookup=True, half_rows={64: 16})
    half, full = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 64)
    assert choice.expansion(half, half) == (16, torch.bfloat16)
    assert choice.expansion(half, full)[0] == choice.expansion(full, full)[0] == NEVER
    assert choice.expansion(half[:, :32], half)[0] == NEVER
