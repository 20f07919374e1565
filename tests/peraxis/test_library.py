"""The functions of `import peraxis`, its docstrings' examples, and the page that describes them."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import peraxis
from compressor.config import CompressConfig
from compressor.pipeline import compress
from deltastore.errors import ArtifactError, BaseMismatch, UsageError
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.manifest import Manifest
from peraxis import artifact, library
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, load_whole, make_pair, make_tokenizer
from tests.helpers.tiny_stacks import STACK, write_stacks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A base and a fine-tune with a chat template."""
    change = Change(chat_template=CHAT_TEMPLATE, noise=0.2)
    made = make_pair("llama", tmp_path_factory.mktemp("models"), changes=(change,))
    make_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(made.base)
    return made


@pytest.fixture(scope="module")
def delta(models: TinyModels) -> Path:
    path = models.base.parent / "delta.safetensors"
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), path))
    return path


@pytest.fixture
def opened(delta: Path) -> Iterator[artifact.Artifact]:
    with peraxis.open(delta) as found:
        yield found


def test_examples_in_docstrings_run(models: TinyModels, delta: Path, tmp_path: Path) -> None:
    names = {
        "base": models.base,
        "finetune": models.finetunes[0],
        "my_delta": delta,
        "directory": tmp_path,
        "model": load_whole(models.base),
        "prompts": {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.ones(2, 2)},
        **{name: getattr(library, name) for name in ("compress", "open", "merge", "evaluate", "attach")},
    }
    runner = doctest.DocTestRunner()
    found = [test for test in doctest.DocTestFinder().find(library, globs=names) if test.examples]
    assert {test.name.rpartition(".")[2] for test in found} == {
        "compress",
        "open",
        "merge",
        "evaluate",
        "attach",
    }
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_importing_peraxis_imports_nothing_large() -> None:
    large = ("torch", "httpx", "numpy", "pydantic", "typer", "rich", "client", "compressor", "deltastore")
    program = f"import sys, peraxis; dir(peraxis); print({{*{large!r}}} & {{*sys.modules}} or '')"
    assert printed_by(program) == ""


@pytest.mark.parametrize(
    ("name", "unneeded"),
    [
        ("Client", ("torch", "numpy", "pydantic", "compressor")),
        ("AsyncClient", ("torch", "numpy", "pydantic", "compressor")),
        ("compress", ("torch", "httpx", "transformers")),
        ("open", ("torch", "httpx", "transformers")),
        ("attach", ("torch", "httpx", "transformers")),
    ],
)
def test_a_name_imports_only_what_it_needs(name: str, unneeded: tuple[str, ...]) -> None:
    assert (
        printed_by(f"import sys, peraxis; peraxis.{name}; print({{*{unneeded!r}}} & {{*sys.modules}} or '')")
        == ""
    )


def printed_by(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_every_public_name_is_found_and_listed() -> None:
    assert {*peraxis.__all__} <= {*dir(peraxis)}
    for name in peraxis.__all__:
        assert getattr(peraxis, name).__doc__


def test_types_are_published() -> None:
    for package in ("peraxis", "client", "compressor", "deltastore", "server"):
        assert (ROOT / package / "py.typed").is_file()


def test_an_artifact_is_the_one_that_was_made(models: TinyModels, delta: Path, tmp_path: Path) -> None:
    made = peraxis.compress(
        models.base, models.finetunes[0], tmp_path / "own.safetensors", calibration="none"
    )
    assert made.path.read_bytes() == delta.read_bytes()
    assert isinstance(made, Artifact)
    other = make_pair("llama", tmp_path / "other", 1)
    with pytest.raises(BaseMismatch):
        peraxis.merge(other.base, made, tmp_path / "merged")
    made.close()


def test_errors_name_this_packages_arguments(models: TinyModels, tmp_path: Path) -> None:
    pair, out = (models.base, models.finetunes[0]), tmp_path / "a.safetensors"
    for options, expected in (
        ({"calibration": "none", "budget": 1.5}, r"`budget` does nothing .* give `calibration='self'`"),
        ({"samples": 0}, r"`samples` 0: give at least 1, or `calibration='none'`"),
        ({"budget": 17}, r"`budget` 17: "),
        ({"calibration": str(tmp_path / "gone.txt")}, r"gone\.txt"),
    ):
        with pytest.raises(UsageError, match=expected) as refused:
            peraxis.compress(*pair, out, **options)
        assert "--" not in str(refused.value)
        assert "`text" not in str(refused.value)
    with pytest.raises(TypeError, match="sample"):
        peraxis.compress(*pair, out, sample=3)
    assert not out.exists()


@pytest.mark.parametrize("content", [None, b"", b"no artifact", bytes(100)])
def test_a_file_that_is_no_artifact_is_one_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match=re.escape(str(path))):
        peraxis.open(path)


def test_an_artifact_may_be_closed_twice_and_closes_when_it_is_gone(delta: Path) -> None:
    found = peraxis.open(str(delta))
    descriptor = Path(f"/proc/self/fd/{found.fd}")
    assert descriptor.resolve() == delta
    with found:
        found.close()
    assert not descriptor.exists() or descriptor.resolve() != delta
    found = peraxis.open(delta)
    descriptor = Path(f"/proc/self/fd/{found.fd}")
    assert descriptor.resolve() == delta
    del found
    assert not descriptor.exists() or descriptor.resolve() != delta


class _Page(HTMLParser):
    """Collects the cells of a table, the widths of bars, and all tags; a tag that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.widths: list[float] = []
        self.open_tags: list[str] = []
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open_tags.append(tag)
        if tag == "rect":
            self.widths.append(float(dict(attrs)["width"] or 0))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "td":
            self.cells.append(data)


def test_a_notebook_shows_an_artifacts_tensors_and_axes(opened: artifact.Artifact) -> None:
    page = _Page(opened._repr_html_())
    tensors = opened.manifest.tensors
    assert {*tensors} <= {*page.cells}
    assert page.tags.count("tr") == len(tensors) + 1
    coded = sum(spec.axis == "both" for spec in tensors.values())
    assert 0 < coded < len(tensors)
    whole = len(tensors) - coded
    assert page.widths == [
        pytest.approx(240 * count / max(coded, whole), abs=0.1) for count in (coded, whole)
    ]
    assert repr(opened).startswith("<Artifact delta.safetensors: ")
    assert len(repr(opened)) < 300


def test_a_notebook_shows_stacks_of_experts_as_coded(tmp_path: Path) -> None:
    write_stacks(tmp_path / "stacks.safetensors")
    with peraxis.open(tmp_path / "stacks.safetensors") as opened:
        cells = _Page(opened._repr_html_()).cells
    first = cells.index(STACK)
    assert cells[first : first + 4] == [STACK, "3 × 5 × 13", "both", "1"]


def test_names_in_an_artifact_cannot_put_markup_into_a_notebook(delta: Path, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&"
    with Artifact.open(delta) as found:
        name = next(name for name, spec in found.manifest.tensors.items() if spec.codec == "whole")
        tensor, spec = found.whole(name), found.manifest.tensors[name]
        facts = found.manifest.model_dump()
    path = tmp_path / "<script>\u202e.safetensors"
    with ArtifactWriter(path) as writer:
        writer.add_whole(evil, tensor)
        changed = {
            "tensors": {evil: spec}, "files": [], "base_id": "<b>&", "device_bytes": writer.device_bytes,
        }  # fmt: skip
        writer.finish(Manifest.model_validate({**facts, **changed}))
    with peraxis.open(path) as opened:
        shown = opened._repr_html_()
    assert "script" not in _Page(shown).tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in shown
    assert "\u202e" not in shown


def test_a_table_has_a_bound(opened: artifact.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "MAX_ROWS", 3)
    shown = opened._repr_html_()
    assert _Page(shown).tags.count("tr") == 4
    assert f"and {len(opened.manifest.tensors) - 3} more tensors" in shown


def test_the_page_names_every_call_of_a_client() -> None:
    calls = {name for name, found in vars(peraxis.Client).items() if callable(found) and name[0] != "_"}
    text = PAGE.read_text()
    assert not [name for name in calls - {"at", "close"} if f"`{name}`" not in text]
