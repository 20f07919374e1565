"""The package as a library: its functions, and the example that calls them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import compressor
import deltastore
from deltastore.checkpoint import Checkpoint
from deltastore.errors import UsageError
from tests.helpers.tiny_models import Change, TinyModels, make_pair

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compress.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return make_pair("llama", tmp_path_factory.mktemp("models"), changes=(Change(noise=0.2),))


def test_the_example_compresses_measures_and_merges(
    models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(str(models.base), str(models.finetunes[0]), str(tmp_path), "8")
    printed = capsys.readouterr().out
    assert printed.count("KL") == 3
    merged, base = Checkpoint.open(tmp_path / "merged"), Checkpoint.open(models.base)
    assert merged.tensors.keys() == base.tensors.keys()


def test_weights_alone_have_no_kl_and_the_options_of_the_command(models: TinyModels, tmp_path: Path) -> None:
    made = compressor.compress(
        models.base, models.finetunes[0], tmp_path / "delta", text="none", method="scalar"
    )
    assert made.kl is None
    with deltastore.Artifact.open(made.out) as artifact:
        assert artifact.manifest.method == "scalar"
        assert json.loads(json.dumps(made.as_json()))["digest"].endswith(made.digest)


def test_errors_name_arguments_and_not_flags(models: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^`samples` 3: give at least 4") as caught:
        compressor.compress(models.base, models.finetunes[0], tmp_path / "delta", samples=3)
    assert "--" not in str(caught.value)
    with pytest.raises(TypeError, match="sample"):
        compressor.compress(models.base, models.finetunes[0], tmp_path / "delta", sample=3)


@pytest.mark.parametrize("name", deltastore.__all__)
def test_the_parts_of_deltastore_are_found_by_name(name: str) -> None:
    assert getattr(deltastore, name).__name__ == name


def test_a_part_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Delta'"):
        deltastore.Delta  # noqa: B018
