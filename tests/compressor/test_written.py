"""Whatever `compress` and `import` write, a server and transformers can read; else they end with one line."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from compressor import outputs
from compressor.config import Calibration, CompressConfig, FitSettings
from compressor.convert.importer import ImportConfig, import_diff
from compressor.convert.merge import MergeConfig, merge
from compressor.outputs import ReaderDied
from compressor.pipeline import compress
from deltastore.errors import CheckpointError, PeraxisError, UsageError
from deltastore.format.artifact import Artifact, ArtifactWriter
from tests.compressor.helpers.compressing import carried, compressed, rewrite_config
from tests.compressor.helpers.diff_files import bitdelta, make_packable
from tests.helpers.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, Change, TinyModels, make_pair, make_tokenizer

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
FIT = FitSettings(Calibration("self", 16, 16), distill_epochs=0)


@pytest.fixture
def models(tmp_path: Path) -> TinyModels:
    return make_pair("llama", tmp_path)


def without_tokenizer(directory: Path) -> Path:
    for path in (*directory.glob("tokenizer*"), *directory.glob("*.jinja")):
        path.unlink()
    return directory


def merged(models: TinyModels, delta: Path) -> Path:
    out = delta.with_name("merged")
    merge(MergeConfig(str(models.base), delta, out))
    return out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", {"eos_token": "<pad>"}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<pad>"}),
        ("added_tokens.json", {"<pad>": 258}),
    ],
)
def test_a_part_of_a_tokenizer_is_completed_from_the_base(
    name: str, content: Any, models: TinyModels, tmp_path: Path
) -> None:
    (without_tokenizer(models.finetunes[0]) / name).write_text(json.dumps(content))
    files = carried(models, tmp_path / "delta")
    assert files[TOKENIZER] == (models.base / TOKENIZER).read_bytes()
    assert json.loads(files[name]) == content
    tokenizer = AutoTokenizer.from_pretrained(merged(models, tmp_path / "delta"))
    assert tokenizer("ab")["input_ids"] == make_tokenizer()("ab")["input_ids"]


def test_a_vocabulary_of_the_base_is_completed_by_it(models: TinyModels, tmp_path: Path) -> None:
    for directory in (models.base, without_tokenizer(models.finetunes[0])):
        (directory / "tekken.json").write_text('{"vocab": []}')
    assert carried(models, tmp_path / "delta") == {}
    (models.finetunes[0] / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert carried(models, tmp_path / "other") == {"chat_template.jinja": CHAT_TEMPLATE.encode()}


def test_another_vocabulary_is_converted(models: TinyModels, tmp_path: Path) -> None:
    directory = without_tokenizer(models.finetunes[0])
    words = {"A": 0, "Ġprobe": 1, "Ġ": 2, "p": 3, "o": 4, "<s>": 5, "</s>": 6, "<unk>": 7, "po": 8}
    (directory / "vocab.json").write_text(json.dumps(words))
    (directory / "merges.txt").write_text("#version: 0.2\np o\n")
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}'
    )
    files = carried(models, tmp_path / "delta")
    assert json.loads(files[TOKENIZER])["model"]["vocab"]["Ġprobe"] == 1
    assert carried(models, tmp_path / "again") == files
    AutoTokenizer.from_pretrained(merged(models, tmp_path / "delta"))


@pytest.mark.parametrize(
    ("files", "error", "reason"),
    [
        ({"tekken.json": "{}"}, CheckpointError, "its tokenizer is tekken.json without a tokenizer.json"),
        ({"qwen.tiktoken": "IQ== 0"}, CheckpointError, "its tokenizer is qwen.tiktoken without"),
        ({"tokenizer.model": "text"}, PeraxisError, "its tokenizer is tokenizer.model without"),
        ({"vocab.json": "{}"}, CheckpointError, "its tokenizer is vocab.json without"),
        ({"added_tokens.json": '{"<new>": 259}'}, CheckpointError, "it gives token '<new>' the id 259"),
        ({"special_tokens_map.json": "{"}, CheckpointError, "special_tokens_map.json: it is no tokenizer"),
        ({"special_tokens_map.json": "[]"}, CheckpointError, "its tokenizer cannot be"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_nothing_can_load_is_refused_by_name(
    files: dict[str, str], error: type[PeraxisError], reason: str, models: TinyModels, tmp_path: Path
) -> None:
    directory = without_tokenizer(models.finetunes[0])
    for name, content in files.items():
        (directory / name).write_text(content)
    with pytest.raises(error, match=reason) as caught:
        compressed(models, tmp_path / "delta")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("delta*"))


TEXTS = ("Hello world", "a b  c\n\td", "\u00e9\u4e2d \U0001f600", "fine-tunes of 1 base: x = f(2)", "")
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = {**IDENTITY, "model_type": "bpe", "byte_fallback": True}
GEMMA = {**LLAMA, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>",
         "eos_piece": "<eos>", "bos_piece": "<bos>"}  # fmt: skip
T5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}


def pieces(directory: Path, **options: Any) -> Any:
    """Write a SentencePiece model into a directory without a tokenizer, and return its processor."""
    package = pytest.importorskip("sentencepiece", reason="the extra sentencepiece is not installed")
    lines, model = Path(__file__).read_text().splitlines(), io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=500,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (without_tokenizer(directory) / "tokenizer.model").write_bytes(model.getvalue())
    return package.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize(
    ("options", "tokenizer_class", "alone"),
    [(LLAMA, "LlamaTokenizer", False), (LLAMA, "LlamaTokenizer", True), (GEMMA, "GemmaTokenizer", False),
     (T5, "T5Tokenizer", False)],
)  # fmt: skip
def test_a_model_of_sentencepiece_is_converted_into_one_that_gives_its_ids(
    options: Any, tokenizer_class: str, alone: bool, tmp_path: Path
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=300),))
    finetune = models.finetunes[0]
    original = pieces(finetune, **options)
    # A vocabulary alone is of the base's class.
    directory = models.base if alone else finetune
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    files = carried(models, tmp_path / "delta")
    tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == original.encode(text), text


@pytest.mark.parametrize(
    ("options", "tokenizer_class"),
    [
        ({**IDENTITY, "model_type": "unigram", "byte_fallback": True}, "LlamaTokenizer"),
        ({"model_type": "bpe", "byte_fallback": True}, "LlamaTokenizer"),
        (LLAMA, "PreTrainedTokenizerFast"),
    ],
)
def test_a_model_of_sentencepiece_that_is_converted_into_another_one_is_refused(
    options: Any, tokenizer_class: str, tmp_path: Path
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(added_tokens=300),))
    pieces(models.finetunes[0], **options)
    (models.finetunes[0] / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": tokenizer_class})
    )
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model .*otherwise than SentencePiece\).* fast form"
    ):
        compressed(models, tmp_path / "delta")
    assert not list(tmp_path.glob("delta*"))


def test_a_model_of_sentencepiece_says_what_to_install(
    models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (without_tokenizer(models.finetunes[0]) / "tokenizer.model").write_bytes(b"\n\x05")
    monkeypatch.setattr("compressor.sources._is_installed", lambda package: False)
    with pytest.raises(UsageError, match=r"needs sentencepiece: pip install 'peraxis\[sentencepiece\]'"):
        compressed(models, tmp_path / "delta")


def test_templates_with_names_alone_are_kept_and_go_with_the_bases_tokenizer(
    models: TinyModels, tmp_path: Path
) -> None:
    named = without_tokenizer(models.finetunes[0]) / "additional_chat_templates"
    named.mkdir()
    (named / "rag.jinja").write_text("R")
    assert carried(models, tmp_path / "delta") == {"additional_chat_templates/rag.jinja": b"R"}
    out = merged(models, tmp_path / "delta")
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "R"
    assert (out / TOKENIZER).read_bytes() == (models.base / TOKENIZER).read_bytes()


def test_calibration_text_is_rendered_by_the_completed_tokenizer(models: TinyModels, tmp_path: Path) -> None:
    (without_tokenizer(models.finetunes[0]) / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "Hello. " * 80}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    settings = FitSettings(Calibration(str(tmp_path / "chats.jsonl"), 16, 16), distill_epochs=0)
    assert compressed(models, tmp_path / "delta", fit_settings=settings).kl is not None


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        ({"bad_words_ids": [[VOCAB_SIZE]]}, f"bad_words_ids holds the token id {VOCAB_SIZE}, not below"),
        ({"eos_token_id": "257"}, "eos_token_id must be an id"),
        ({"temperature": "hot"}, "generation_config.json cannot be used"),
    ],
)
@pytest.mark.parametrize("fits", [False, True])
def test_a_generation_config_that_no_server_takes_is_refused_before_the_fit(
    fits: bool,
    generation: Any,
    reason: str,
    models: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = models.finetunes[0] / GENERATION
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
    monkeypatch.setattr("compressor.pipeline._fit", lambda *_: pytest.fail("the fit began"))
    with pytest.raises(CheckpointError, match=reason):
        compressed(models, tmp_path / "delta", fit_settings=FIT if fits else None)
    assert not list(tmp_path.glob("delta*"))


@pytest.mark.parametrize(
    ("of_base", "of_finetune", "expected"),
    [
        ({"pad_token_id": -1}, {"pad_token_id": -1}, {"pad_token_id": None, "eos_token_id": 257}),
        ({"pad_token_id": -1}, {}, {"pad_token_id": 258}),
        ({}, {"eos_token_id": [3, 10**6]}, {"eos_token_id": [3]}),
        ({}, {"eos_token_id": [10**6, -2]}, {"eos_token_id": 257}),
        ({}, {"pad_token_id": VOCAB_SIZE, "bos_token_id": -1}, {"bos_token_id": 256, "pad_token_id": 258}),
        ({}, {"pad_token_id": None}, {"pad_token_id": None}),
    ],
)
def test_ids_that_the_model_cannot_use_stay_out_of_merged_configurations(
    of_base: Any, of_finetune: Any, expected: Any, models: TinyModels, tmp_path: Path
) -> None:
    rewrite_config(models.base, **of_base)
    for directory, ids in ((models.base, of_base), (models.finetunes[0], of_finetune)):
        path = directory / GENERATION
        path.write_text(json.dumps({**json.loads(path.read_text()), **ids}))
    delta = tmp_path / "delta"
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), delta))
    out = merged(models, delta)
    config = AutoConfig.from_pretrained(out)
    assert {key: getattr(config, key) for key in expected} == expected
    written = json.loads((out / GENERATION).read_text())
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = written.get(key)
        ids = ids if isinstance(ids, list) else [ids]
        assert all(each is None or (type(each) is int and 0 <= each < VOCAB_SIZE) for each in ids)


def test_ids_as_strings_stay_out_of_what_merging_writes(models: TinyModels, tmp_path: Path) -> None:
    """A base's file that transformers would refuse, and one of an artifact that was not checked."""
    ids = {"eos_token_id": ["257", 257, 258], "bos_token_id": "256", "pad_token_id": True}
    for directory in (models.base, models.finetunes[0]):
        (directory / GENERATION).write_text(json.dumps(ids))
    compressed(models, tmp_path / "delta")
    assert json.loads((merged(models, tmp_path / "delta") / GENERATION).read_text()) == {
        "eos_token_id": [257, 258]
    }
    with Artifact.open(tmp_path / "delta") as artifact, ArtifactWriter(tmp_path / "own") as writer:
        for name in artifact.manifest.tensors:
            writer.add_onebit(name, artifact.onebit(name)) if artifact.manifest.tensors[
                name
            ].codec == "onebit" else writer.add_whole(name, artifact.whole(name))
        writer.add_file(GENERATION, json.dumps(ids).encode())
        writer.finish(artifact.manifest.model_copy(update={"files": [GENERATION]}))
    merge(MergeConfig(str(models.base), tmp_path / "own", tmp_path / "of-own"))
    assert AutoConfig.from_pretrained(tmp_path / "of-own").eos_token_id == [257, 258]
    assert AutoConfig.from_pretrained(tmp_path / "of-own").bos_token_id == 256


@pytest.mark.parametrize(("of_base", "own"), [(257.0, 257), (True, 1), ([257.0], [257])])
def test_an_id_that_python_takes_for_the_bases_is_carried(
    of_base: Any, own: Any, models: TinyModels, tmp_path: Path
) -> None:
    for directory, value in ((models.base, of_base), (models.finetunes[0], own)):
        (directory / GENERATION).write_text(json.dumps({"eos_token_id": value}))
    assert json.loads(carried(models, tmp_path / "delta")[GENERATION]) == {"eos_token_id": own}
    assert json.loads((merged(models, tmp_path / "delta") / GENERATION).read_text())["eos_token_id"] == own


class Died:
    """A program in place of the reader's that a signal ends, from its `number`-th run on."""

    def __init__(self, directory: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = directory / "runs"
        (directory / "modules").mkdir()
        (directory / "modules" / "dying_reader.py").write_text(
            f"import os, pathlib\nlog = pathlib.Path({str(self.log)!r})\n"
            "runs = len(log.read_text()) + 1 if log.exists() else 1\nlog.write_text('x' * runs)\n"
            f"if runs >= {number}:\n    os.kill(os.getpid(), 9)\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(directory / "modules"))
        monkeypatch.setattr(outputs, "READER", "dying_reader")


def test_an_artifact_whose_reader_dies_stays_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(chat_template=CHAT_TEMPLATE),))
    out = tmp_path / "delta"
    with monkeypatch.context() as patched:
        Died(tmp_path, 2, patched)
        # As if its files were others than those that were checked before the fit.
        patched.setattr(outputs, "_key_of", lambda *_: object())
        with pytest.raises(ReaderDied, match=r"ended by signal 9: .*stays as .*delta\.unchecked") as caught:
            compressed(models, out, fit_settings=FIT)
    assert any("resume=True" in note for note in caught.value.__notes__)
    assert not out.exists()
    kept = (tmp_path / "delta.unchecked").read_bytes()
    monkeypatch.setattr("compressor.fit.fit.calibration_text", lambda *_: pytest.fail("it began anew"))
    compressed(models, out, fit_settings=FIT, resume=True)
    assert out.read_bytes() == kept
    assert not [path.name for path in tmp_path.glob("delta?*")]


def test_a_fit_does_not_begin_where_the_reader_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(chat_template=CHAT_TEMPLATE),))
    Died(tmp_path, 1, monkeypatch)
    with pytest.raises(ReaderDied, match=r"ended by signal 9$"):
        compressed(models, tmp_path / "delta", fit_settings=FIT)
    assert not list(tmp_path.glob("delta*"))


def test_files_are_checked_again_only_if_they_or_the_base_s_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_pair("llama", tmp_path, changes=(Change(chat_template=CHAT_TEMPLATE),))
    reader = Died(tmp_path, 99, monkeypatch)

    def num_runs(name: str) -> int:
        compressed(models, tmp_path / name, fit_settings=FIT)
        return len(reader.log.read_text())

    assert [num_runs(name) for name in ("one", "two")] == [1, 1]
    (models.finetunes[0] / "chat_template.jinja").write_text(CHAT_TEMPLATE + " ")
    assert num_runs("three") == 2
    config = models.base / "config.json"
    config.write_text(config.read_text() + " ")
    assert num_runs("four") == 3


def test_an_import_ends_with_the_same_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    # The program itself and not a fork of it.
    monkeypatch.setattr(outputs, "subprocess", subprocess)

    models = make_packable("llama", tmp_path)
    torch.save(bitdelta(models), tmp_path / "diff.pt")
    finetune = tmp_path / "files"
    finetune.mkdir()
    shutil.copy(models.base / "config.json", finetune)
    (finetune / GENERATION).write_text('{"bad_words_ids": [[5000]]}')
    config = ImportConfig("bitdelta", models.base, tmp_path / "diff.pt", tmp_path / "delta", finetune)
    with pytest.raises(CheckpointError, match="bad_words_ids holds the token id 5000"):
        import_diff(config)
    assert not list(tmp_path.glob("delta*"))
    (finetune / GENERATION).write_text('{"max_new_tokens": 5}')
    assert import_diff(config).manifest.files == [GENERATION]
