"""The text of a model card: what it tells of a delta, and that names and texts of fine-tunes stay text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compressor.model_card import DeltaFacts, TensorFacts, visible
from compressor.tasks import Example
from compressor.writer import WrittenDelta
from deltastore.format.artifact import Artifact
from deltastore.format.manifest import TensorSpec
from tests.compressor.helpers.compressing import compressed, enriched
from tests.compressor.helpers.model_cards import (
    HELD_OUT,
    OF_BASE,
    RenderedCard,
    card_of,
    facts_of,
    model_of,
    onebit,
)
from tests.helpers.tiny_models import Change, make_pair

MATRIX = "model.layers.0.self_attn.q_proj.weight"
TAGS = {
    "h1", "h2", "p", "code", "pre", "em", "table", "thead", "tbody", "tr", "th", "td", "details", "summary",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeltaFacts, RenderedCard]:
    """The card of a real artifact with two planes and a residual in one matrix."""
    directory = tmp_path_factory.mktemp("tiny")
    models = make_pair("llama", directory, changes=(Change(added_tokens=3),))
    plain = compressed(models, directory / "plain")
    out = enriched(directory / "plain", directory / "tuned.safetensors", {MATRIX: (2, 4)})
    with Artifact.open(out) as artifact:
        written = replace(
            plain,
            out=out,
            digest=artifact.digest(),
            artifact_bytes=artifact.size_bytes,
            manifest=artifact.manifest,
        )
    facts = DeltaFacts.of(written, "tiny-tuned", [])
    return facts, card_of(facts, directory / "report")


def test_the_sizes_add_up_to_the_file(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    facts, _ = tiny
    assert sum(facts.sizes.values()) == facts.written.out.stat().st_size
    assert all(facts.sizes[kind] > 0 for kind in facts.sizes)


def test_the_ratio_is_to_the_finetune_at_16_bits(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    facts, card = tiny
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 92 + 2 * 64) + 2 * 262 * 64 + 64
    assert isinstance(facts.written, WrittenDelta)
    assert facts.written.full_bytes == 2 * weights
    assert f"{2 * weights / facts.written.artifact_bytes:.2f} times smaller" in card.text


def test_it_begins_with_what_the_artifact_is(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    facts, card = tiny
    head = card.text[: card.text.index("Fidelity")]
    for fact in (
        "tuned.safetensors",
        "tiny-tuned",
        f"sha256:{facts.written.digest}",
        facts.written.manifest.base_fingerprint,
    ):
        assert fact in head


def test_it_says_how_to_serve_and_how_to_merge(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    _, card = tiny
    upload = "curl -X POST 'localhost:8000/variants?name=NAME' -H 'Content-Type: application/octet-stream'"
    assert f"{upload} --data-binary @tuned.safetensors" in card.text
    assert "peraxis merge --base base --delta tuned.safetensors --out DIR" in card.text


def test_it_ends_with_the_settings(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    _, card = tiny
    assert '"calibration": "none"' in card.text[card.text.index("Settings") :]


def test_every_tensor_of_the_manifest_is_in_the_table(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    facts, card = tiny
    table = card.text[card.text.index("All tensors") :]
    assert all(name in table for name in facts.written.manifest.tensors)


def test_a_matrix_with_more_than_one_bit_is_where_the_budget_went(
    tiny: tuple[DeltaFacts, RenderedCard],
) -> None:
    facts, card = tiny
    budget = card.text[card.text.index("Where the budget went") : card.text.index("All tensors")]
    extra = 64 * 8 + 2 * (64 + 64) + 4 + 2 * 4 * (64 + 64)
    assert [tensor.extra_bytes for tensor in facts.tensors if tensor.extra_bytes] == [extra]
    assert f"q_proj 1 of 2 2 4 {extra / 1000:.2f}kB" in budget


def test_without_further_planes_there_is_no_budget(tmp_path: Path) -> None:
    assert "budget went" not in card_of(facts_of(model_of(2)), tmp_path).text


def test_fidelity_that_was_not_measured_is_said_to_be_so(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    _, card = tiny
    assert "No fidelity on text was measured" in card.text
    assert card.data.eval_results is None


def test_the_fidelity_table_has_base_and_delta_beside_the_finetune(tmp_path: Path) -> None:
    card = card_of(facts_of(model_of(1), {"held_out": HELD_OUT, "base": OF_BASE}), tmp_path)
    for row in ("base 0.42 70.12% 9.8", "delta 0.0021 98.12% 6.51", "fine-tune 0 100% 6.5"):
        assert row in card.text
    assert "the delta goes 99.50% of the way" in card.text
    assert "On 2,496 tokens" in card.text


def test_the_metadata_has_the_base_and_what_was_measured(tmp_path: Path) -> None:
    data = card_of(facts_of(model_of(1), {"held_out": HELD_OUT}, base_id="org/base"), tmp_path).data
    assert (data.base_model, data.library_name, data.license) == ("org/base", "peraxis", None)
    assert data.eval_results is not None
    assert {result.metric_type: result.metric_value for result in data.eval_results} == {
        key: HELD_OUT[key] for key in ("kl", "agreement", "perplexity")
    }


def test_a_base_that_is_no_hub_id_is_not_in_the_metadata(tmp_path: Path) -> None:
    assert card_of(facts_of(model_of(1), base_id="my base"), tmp_path).data.base_model is None
    # The hub takes no revision there; the commands have it.
    card = card_of(facts_of(model_of(1), base_id="org/base@v1.0"), tmp_path)
    assert card.data.base_model == "org/base"
    assert "--base org/base@v1.0 " in card.text


@pytest.mark.parametrize(
    "fidelity", [{"held_out": {"kl": 0.1}}, {"held_out": {"kl": True, "agreement": "x"}, "base": 3}]
)
def test_a_figure_that_is_missing_is_a_dash(fidelity: dict[str, object], tmp_path: Path) -> None:
    card = card_of(facts_of(model_of(1), fidelity), tmp_path)
    assert "fine-tune 0 100% –" in card.text
    assert "of the way" not in card.text


def test_where_an_example_differs_from_the_finetune_is_told_apart(tmp_path: Path) -> None:
    examples = (Example("2 + 2 =", " 5, or so", " 4.", " 4."), Example("a", "bc", "bcd", "bce"))
    card = card_of(facts_of(model_of(1), examples=examples), tmp_path)
    rows = [row for row in card.rows if row[0] in ("base", "fine-tune", "delta")]
    assert [row[2] for row in rows if row[0] != "fine-tune"] == ["5, or so", "", "ends here", "e"]
    assert [row[1].strip() for row in rows] == ["", "4.", "4.", "bc", "bcd", "bc"]


def test_text_of_examples_is_escaped_and_control_characters_are_seen(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script>\x00\x1b[31m\tx\u202e\u2028\ud800\x85\n| a | `b`"
    card = card_of(facts_of(model_of(1), examples=(Example(nasty, "", nasty, ""),)), tmp_path)
    assert {tag for tag, _ in card.tags} <= TAGS
    seen = "<script>alert(1)</script>⟨U+0000⟩⟨U+001B⟩[31m→x⟨U+202E⟩⟨U+2028⟩⟨U+D800⟩⟨U+0085⟩↵| a | `b`"
    assert f"Prompt: {seen}" in card.text
    assert ["fine-tune", seen, ""] in card.rows


@pytest.mark.parametrize(
    "name",
    [
        "<img src=x onerror=alert(1)>",
        '"><b>',
        "</details>",
        "$\\frac{$",
        "语言模型",
        "\u202eevil",
        "{{ 7 * 7 }}",
        "{% raw %}",
        "[x](javascript:alert(1))",
        "https:evil.example",
        "a | b",
        "`` ` ``",
        "```",
        "a\n---\nlicense: mit\n# b",
        "'a': *b # c",
        "\\",
        "x" * 512,
        ".",
        "..",
        "5",
        "a.5",
    ],
)
def test_hostile_names_are_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    specs = {
        f"model.layers.0.{name}.weight": onebit(),
        name: onebit("in", 0.7),
        f"{name}.7.{name}.9": onebit(),
    }
    settings, base_id = {name: {name: [name, None]}}, name if name.isprintable() else "tiny"
    fidelity = {name: name, "held_out": HELD_OUT}
    facts = facts_of(specs, fidelity, name=name, compressor=settings, base_id=base_id)
    card = card_of(replace(facts, finetune_id=name), tmp_path)
    shown = name.replace("\u202e", "⟨U+202E⟩").replace("\n", "↵")
    assert f"model.layers.0.{shown}.weight" in card.text
    assert {tag for tag, _ in card.tags} <= TAGS
    assert card.data.license is None
    assert card.data.model_name == visible(facts.written.out.name)


def test_the_card_refers_to_nothing(tiny: tuple[DeltaFacts, RenderedCard]) -> None:
    _, card = tiny
    assert not {tag for tag, _ in card.tags} & {"script", "link", "iframe", "object", "a", "img"}
    assert "http://" not in card.content
    assert "https://" not in card.content


def test_an_artifact_without_a_coded_matrix_has_a_card(tmp_path: Path) -> None:
    specs = {"model.norm.weight": TensorSpec(codec="whole", shape=[32])}
    card = card_of(facts_of(specs), tmp_path)
    assert "No matrix is coded" in card.text


def test_an_artifact_that_changes_nothing_has_a_card(tmp_path: Path) -> None:
    assert "0 tensors differ" in card_of(facts_of({}), tmp_path).text


def test_an_imported_artifact_has_axes_and_no_errors(tmp_path: Path) -> None:
    specs = {f"model.layers.{layer}.mlp.up_proj.weight": onebit("scalar", None) for layer in range(2)}
    card = card_of(facts_of(specs, compressor={"settings": {"imported": "bitdelta"}}), tmp_path)
    assert ["up_proj", "2", ""] in card.rows
    assert '"imported": "bitdelta"' in card.text


def test_axes_and_errors_are_told_by_module_type(tmp_path: Path) -> None:
    specs = {f"model.layers.{n}.mlp.up_proj.weight": onebit("in", 0.4 + n / 10) for n in range(2)}
    card = card_of(facts_of({**specs, "model.layers.2.mlp.up_proj.weight": onebit("out", 0.45)}), tmp_path)
    assert ["Module type", "out", "in", "Error"] in card.rows
    assert ["up_proj", "1", "2", "0.4000–0.5000"] in card.rows


def test_a_card_of_32_layers_is_below_500_kilobytes(tmp_path: Path) -> None:
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "input_layernorm")
    card = card_of(facts_of(model_of(32, tuple(f"block.{module}" for module in modules))), tmp_path)
    assert len(card.content.encode()) < 500_000


def test_experts_of_one_kind_share_a_row(tmp_path: Path) -> None:
    experts = tuple(f"mlp.experts.{number}.w1" for number in range(200))
    card = card_of(facts_of(model_of(20, experts)), tmp_path)
    assert "model.layers.7.mlp.experts.*.w1 (200)" in card.text
    assert "experts.w1 4000" in card.text
    assert len(card.content) < 500_000


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "q_proj"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "experts.w1"),
        ("model.layers.3.mlp.experts.gate_up_proj", "gate_up_proj"),
        ("transformer.h.0.attn.c_attn.weight", "c_attn"),
        ("lm_head.weight", "lm_head"),
        ("layers.2", "layers"),
        ("a.².weight", "²"),
    ],
)
def test_a_name_says_of_which_type_its_module_is(name: str, module: str) -> None:
    tensor = TensorFacts.of(name, onebit(), 0, 0)
    assert tensor.module == module
