"""The report of a compression: what its page tells, and what it makes of names and texts from strangers."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.evaluate.examples import Example
from compressor.report import Report
from compressor.report_tensors import Place
from deltastore.base.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import TensorSpec
from tests.compressor.helpers.compressing import compressed, enriched
from tests.compressor.helpers.reporting import HELD_OUT, OF_BASE, Page, model_of, onebit, page_of, report_of
from tests.helpers.tiny_models import Change, make_pair

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'peraxis[report]'")

MATRIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Page]:
    """The report of a real artifact with two planes and a residual in one matrix, and its page."""
    directory = tmp_path_factory.mktemp("tiny")
    models = make_pair("llama", directory, changes=(Change(added_tokens=3),))
    compressed(models, directory / "plain")
    enriched(directory / "plain", directory / "tuned.safetensors", {MATRIX: (2, 4)})
    base, finetune = map(Checkpoint.open, (models.base, models.finetunes[0]))
    with Artifact.open(directory / "tuned.safetensors") as artifact:
        report = Report.of(base, finetune, artifact, [], "tiny-tuned")
        assert report.digest == artifact.digest()
    return report, page_of(report, directory / "report")


def test_the_sizes_add_up_to_the_file(tiny: tuple[Report, Page]) -> None:
    report, _ = tiny
    assert sum(report.sizes.values()) == report.size_bytes
    assert all(report.sizes[kind] > 0 for kind in report.sizes)


def test_the_ratio_is_to_the_finetune_at_16_bits(tiny: tuple[Report, Page]) -> None:
    report, page = tiny
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 92 + 2 * 64) + 2 * 262 * 64 + 64
    assert report.full_bytes == 2 * weights
    assert f"{2 * weights / report.size_bytes:.2f}×" in page.text


def test_it_begins_with_what_the_artifact_is(tiny: tuple[Report, Page]) -> None:
    report, page = tiny
    head = page.text[: page.text.index("Fidelity")]
    for fact in (
        "tuned.safetensors",
        "tiny-tuned",
        f"sha256:{report.digest}",
        report.manifest.base_fingerprint,
    ):
        assert fact in head
    assert "calibration none" in head


def test_every_tensor_of_the_manifest_is_in_the_table(tiny: tuple[Report, Page]) -> None:
    report, page = tiny
    table = page.text[page.text.index("All tensors") :]
    assert all(name in table for name in report.manifest.tensors)


def test_a_matrix_with_more_than_one_bit_is_where_the_budget_went(tiny: tuple[Report, Page]) -> None:
    report, page = tiny
    budget = page.text[page.text.index("Where the budget went") : page.text.index("All tensors")]
    extra = 64 * 8 + 2 * (64 + 64) + 4 + 2 * 4 * (64 + 64)
    assert [tensor.extra_bytes for tensor in report.tensors if tensor.has_more] == [extra]
    assert f"q_proj 1 of 2 2 4 {extra / 1000:.2f} kB" in budget


def test_without_further_planes_there_is_no_budget(tmp_path: Path) -> None:
    assert "budget went" not in page_of(report_of(model_of(2)), tmp_path).text


def test_fidelity_that_was_not_measured_is_said_to_be_so(tiny: tuple[Report, Page]) -> None:
    _, page = tiny
    assert "No fidelity on text was measured" in page.text
    assert page.text.count("not measured") == 2


def test_the_fidelity_table_has_base_and_delta_beside_the_finetune(tmp_path: Path) -> None:
    page = page_of(report_of(model_of(1), {"held_out": HELD_OUT, "base": OF_BASE}), tmp_path)
    for row in ("base 0.42 70.12% 9.8", "delta 0.0021 98.12% 6.51", "fine-tune 0 100% 6.5"):
        assert row in page.text
    assert "the delta goes 99.50% of the way" in page.text
    assert "On 2,496 tokens" in page.text


@pytest.mark.parametrize(
    "fidelity", [{"held_out": {"kl": 0.1}}, {"held_out": {"kl": True, "agreement": "x"}, "base": 3}]
)
def test_a_figure_that_is_missing_is_a_dash(fidelity: dict[str, object], tmp_path: Path) -> None:
    page = page_of(report_of(model_of(1), fidelity), tmp_path)
    assert "fine-tune 0 100% –" in page.text
    assert "of the way" not in page.text


def test_where_an_example_differs_from_the_finetune_is_marked(tmp_path: Path) -> None:
    examples = (Example("2 + 2 =", " 5, or so", " 4.", " 4."), Example("a", "bc", "bcd", "bce"))
    page = page_of(report_of(model_of(1), examples=examples), tmp_path)
    assert page.marked() == ["5, or so", "ends here", "e"]
    assert "base differs after 1 character" in page.text
    assert "delta the same" in page.text


def test_text_of_examples_is_escaped_and_control_characters_are_seen(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>\x00\x1b[31m\tx\u202e\u2028\ud800\x85"
    page = page_of(report_of(model_of(1), examples=(Example(nasty, "", nasty, ""),)), tmp_path)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>⟨U+0000⟩⟨U+001B⟩[31m→ x⟨U+202E⟩⟨U+2028⟩⟨U+D800⟩⟨U+0085⟩" in page.text


@pytest.mark.parametrize(
    "name",
    [
        "<img src=x onerror=alert(1)>",
        '"><b>',
        "$\\frac{$",
        "语言模型",
        "\u202eevil",
        "{{ 7 * 7 }}",
        "x" * 512,
        ".",
        "..",
        "5",
        "a.5",
    ],
)
def test_names_of_strangers_are_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    specs = {
        f"model.layers.0.{name}.weight": onebit(),
        name: onebit("in", 0.7),
        f"{name}.7.{name}.9": onebit(),
    }
    settings, base_id = {name: {name: [name, None]}}, name if name.isprintable() else "tiny"
    page = page_of(report_of(specs, {name: name}, name=name, compressor=settings, base_id=base_id), tmp_path)
    assert f"model.layers.0.{name}.weight".replace("\u202e", "⟨U+202E⟩") in page.text
    assert [tag for tag, _ in page.tags].count("b") == 4 + 4  # tiles and axes
    assert not {"onerror", "style"} & {key for _, attributes in page.tags for key in attributes}
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert all(source is not None and source.startswith("data:image/png;base64,") for source in sources)


def test_the_page_looks_at_nothing_outside_itself(tiny: tuple[Report, Page]) -> None:
    _, page = tiny
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "a"}
    assert "http://" not in page.html
    assert "https://" not in page.html
    assert "default-src &#39;none&#39;" in page.html or "default-src 'none'" in page.html


def test_every_image_has_a_text_instead(tiny: tuple[Report, Page]) -> None:
    _, page = tiny
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 3 * 4
    assert all(len(attributes["alt"] or "") > 30 for attributes in images)


def test_an_artifact_without_a_coded_matrix_has_a_report(tmp_path: Path) -> None:
    specs = {"model.norm.weight": TensorSpec(codec="whole", shape=[32])}
    page = page_of(report_of(specs), tmp_path)
    assert "No matrix is coded" in page.text
    assert "No errors are recorded" in page.text
    assert not (tmp_path / "error.png").exists()


def test_an_artifact_that_changes_nothing_has_a_report(tmp_path: Path) -> None:
    assert "0 tensors differ" in page_of(report_of({}), tmp_path).text


def test_an_imported_artifact_has_axes_and_no_errors(tmp_path: Path) -> None:
    specs = {f"model.layers.{layer}.mlp.up_proj.weight": onebit("scalar", None) for layer in range(2)}
    page = page_of(report_of(specs, compressor={"settings": {"imported": "bitdelta"}}), tmp_path)
    assert "No errors are recorded" in page.text
    assert "up_proj 2" in page.text
    assert "imported bitdelta" in page.text


@pytest.mark.parametrize("num_layers", [1, 80])
def test_models_of_any_depth_have_a_figure_of_errors(num_layers: int, tmp_path: Path) -> None:
    page = page_of(report_of(model_of(num_layers)), tmp_path)
    assert page.text.count("model.layers.") >= 2 * num_layers
    assert (tmp_path / "error.png").exists()


def test_a_page_of_32_layers_is_below_500_kilobytes(tmp_path: Path) -> None:
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "input_layernorm")
    page = page_of(report_of(model_of(32, tuple(f"block.{module}" for module in modules))), tmp_path)
    assert len(page.html.encode()) < 500_000


def test_experts_of_one_kind_share_a_row(tmp_path: Path) -> None:
    experts = tuple(f"mlp.experts.{number}.w1" for number in range(200))
    page = page_of(report_of(model_of(20, experts)), tmp_path)
    assert "model.layers.7.mlp.experts.*.w1 (200)" in page.text
    assert "experts.w1 4000" in page.text
    assert len(page.html) < 500_000


@pytest.mark.parametrize(
    ("name", "layer", "module"),
    [
        ("model.layers.12.self_attn.q_proj.weight", 12, "q_proj"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", 3, "experts.w1"),
        ("model.layers.3.mlp.experts.gate_up_proj", 3, "gate_up_proj"),
        ("transformer.h.0.attn.c_attn.weight", 0, "c_attn"),
        ("lm_head.weight", None, "lm_head"),
        ("layers.2", 2, "layers"),
        ("a.².weight", None, "²"),
    ],
)
def test_a_name_says_where_its_tensor_stands(name: str, layer: int | None, module: str) -> None:
    place = Place.of(name)
    assert (place.layer, place.module) == (layer, module)
