"""Calibration text: the sequences of each source, and a one-line error for each that has none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressor.config import Calibration
from compressor.fit.calibration import batched, calibration_text, split_text
from deltastore.errors import CheckpointError, UsageError
from tests.compressor.helpers.decoders import open_decoder
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, make_pair, make_tokenizer

LENGTH = 20
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two of them."}]
TOKENIZER = make_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` has no chat template; `finetune-0` has one and added tokens; `finetune-1` has no tokenizer."""
    directory = tmp_path_factory.mktemp("models")
    chatty = Change(chat_template=CHAT_TEMPLATE, added_tokens=2)
    bare = make_pair("llama", directory, changes=(chatty, Change())).finetunes[1]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    return directory


def text_of(models: Path, source: Path | str, samples: int = 16, name: str = "finetune-0") -> list[list[int]]:
    decoder = open_decoder(models / name)
    return [ids.tolist() for ids in calibration_text(Calibration(str(source), samples, LENGTH), decoder)]


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text(
        "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    )
    return path


def parts_of(ids: list[int]) -> list[list[int]]:
    return [ids[first : first + LENGTH] for first in range(0, len(ids) - LENGTH + 1, LENGTH)]


def test_no_calibration_is_no_text(models: Path) -> None:
    assert text_of(models, "none") == []


def test_a_text_file_is_cut_into_sequences(models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    assert text_of(models, tmp_path / "corpus.txt") == parts_of(ids_of(TEXT))[:16]


def test_a_file_gives_all_the_sequences_it_has_when_more_are_asked_for(models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text(TEXT)
    assert len(text_of(models, tmp_path / "corpus", samples=1000)) == len(ids_of(TEXT)) // LENGTH


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": TEXT}, TEXT),
        ({"prompt": "Ask: ", "completion": TEXT}, f"Ask: {TEXT}</s>"),
        ({"prompt": "Ask: ", "text": TEXT}, TEXT),
        ({"messages": [{"role": "user", "content": TEXT}]}, f"<user>{TEXT}\n<assistant>"),
    ],
)
def test_a_record_is_text_or_prompt_and_completion_or_chat(
    record: Mapping[str, Any], text: str, models: Path, tmp_path: Path
) -> None:
    assert text_of(models, write_lines(tmp_path / "records.jsonl", record)) == parts_of(ids_of(text))[:16]


def test_a_sequence_begins_with_a_record_and_holds_as_many_as_fit(models: Path, tmp_path: Path) -> None:
    records = [{"text": letter * 8} for letter in "abcdefgh" * 12]
    sequences = text_of(models, write_lines(tmp_path / "records.jsonl", *records))
    assert sequences[0] == ids_of("a" * 8 + "b" * 8 + "c" * 4)
    assert sequences[1] == ids_of("d" * 8 + "e" * 8 + "f" * 4)


def test_an_answer_ends_with_the_end_token(models: Path, tmp_path: Path) -> None:
    records = [{"prompt": "1+1=", "completion": str(number)} for number in range(100, 200)]
    first = text_of(models, write_lines(tmp_path / "records.jsonl", *records))[0]
    assert first == [*ids_of("1+1=100</s>1+1=101</s>"), *ids_of("1+1=")]


def test_an_end_token_that_the_tokenizer_gives_itself_is_not_doubled(tmp_path: Path) -> None:
    make_pair("llama", tmp_path, changes=())
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = _ending_with_eos()
    tokenizer.save_pretrained(tmp_path / "base")
    records = [{"prompt": "=", "completion": "x" * 18}] * 16
    sequences = text_of(tmp_path, write_lines(tmp_path / "records.jsonl", *records), name="base")
    assert sequences == [ids_of("=" + "x" * 18 + "</s>")] * 16


def test_blank_lines_between_records_are_nothing(models: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "records.jsonl", "", {"text": TEXT}, "", "")
    assert len(text_of(models, path)) == 16


def test_parts_of_a_long_record_begin_as_the_tokenizer_begins_a_text(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_pair("llama", path, changes=())
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = _beginning_with_bos()
    tokenizer.save_pretrained(path / "base")
    (tmp_path / "corpus.txt").write_text(TEXT)
    sequences = text_of(path, tmp_path / "corpus.txt", name="base")
    assert {ids[0] for ids in sequences} == {tokenizer.bos_token_id}
    assert [token for ids in sequences for token in ids[1:]] == ids_of(TEXT)[: 16 * (LENGTH - 1)]


def _beginning_with_bos() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])


def _ending_with_eos() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 257)])


def test_a_data_set_is_streamed_as_far_as_it_is_needed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, taken = [], []

    def load_dataset(*args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        asked.append((args, kwargs))
        for number in range(1000):
            taken.append(number)
            yield {"text": "x" * LENGTH, "url": "elsewhere"}

    monkeypatch.setitem(sys.modules, "datasets", _datasets_module(load_dataset))
    assert text_of(models, "c4") == [ids_of("x" * LENGTH)] * 16
    assert asked == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]
    assert len(taken) == 16
    text_of(models, "someone/corpus:german")
    assert asked[1][0] == ("someone/corpus", "german")


def _datasets_module(load_dataset: Any) -> Any:
    """A stand-in for the parts of datasets that are used; the real package needs a network."""
    return SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=RuntimeError))


def test_a_data_set_that_cannot_be_reached_is_one_line(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\n(after 5 attempts)")

    monkeypatch.setitem(sys.modules, "datasets", _datasets_module(unreachable))
    with pytest.raises(UsageError, match=r"^`text` c4: .*Couldn't reach the hub \(after 5 attempts\)"):
        text_of(models, "c4")


def test_a_data_set_without_the_datasets_package_says_what_to_install(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(UsageError, match=r"pip install 'peraxis\[eval\]'"):
        text_of(models, "c4")


@pytest.mark.parametrize("source", ["there/is/none", "no such file", "missing.txt", "missing.jsonl"])
def test_a_source_that_is_not_there_is_named(source: str, models: Path) -> None:
    with pytest.raises(UsageError, match=source):
        text_of(models, source)


@pytest.mark.parametrize("name", ["corpus.txt", "records.jsonl"])
def test_an_empty_file_is_named(name: str, models: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(" \n\n")
    with pytest.raises(UsageError, match=f"{name}: it holds no"):
        text_of(models, tmp_path / name)


def test_a_file_that_is_too_short_says_how_much_it_gives(models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT[: 3 * LENGTH + 1])
    with pytest.raises(UsageError, match=r"corpus\.txt: its text makes 3 sequences of 20 tokens, too few"):
        text_of(models, tmp_path / "corpus.txt", samples=1000)


def test_a_file_that_is_not_text_says_where(models: Path, tmp_path: Path) -> None:
    for name in ("corpus.txt", "records.jsonl"):
        (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}')
        with pytest.raises(UsageError, match=rf"{name}: it is not UTF-8 text \(byte 13\)"):
            text_of(models, tmp_path / name)


def test_a_directory_is_no_text(models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").mkdir()
    with pytest.raises(UsageError, match=r"corpus\.txt: Is a directory: give `text` a text file"):
        text_of(models, tmp_path / "corpus.txt")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "unfinished', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1, 2]", "a record is"),
        ({"body": "text"}, "a record is"),
        ({"text": 5}, "a record is"),
        ({"prompt": "only"}, "a record is"),
        ({"prompt": "one", "completion": None}, "a record is"),
        ({"messages": "hello"}, "messages are a list of objects"),
        ({"messages": ["hello"]}, "messages are a list of objects"),
    ],
)
def test_a_bad_record_is_named_by_its_line(line: Any, reason: str, models: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "records.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(UsageError, match=rf"records\.jsonl: line 3: {reason}"):
        text_of(models, path)


def test_chat_records_need_a_chat_template(models: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    with pytest.raises(CheckpointError, match=r"line 1: the fine-tune has no chat template"):
        text_of(models, path, name="base")


def test_a_template_that_refuses_messages_says_why(tmp_path: Path) -> None:
    strict = Change(chat_template="{{ raise_exception('roles must alternate') }}")
    make_pair("llama", tmp_path, changes=(strict,))
    path = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    with pytest.raises(
        UsageError, match=r"line 1: .*template refuses these messages: .*roles must alternate"
    ):
        text_of(tmp_path, path)
    with pytest.raises(UsageError, match=r"`text` self: .*roles must alternate"):
        text_of(tmp_path, "self")


def test_text_needs_a_tokenizer(models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    with pytest.raises(CheckpointError, match=r"finetune-1: there is no tokenizer in it, which .*corpus"):
        text_of(models, tmp_path / "corpus.txt", name="finetune-1")


@pytest.mark.parametrize(
    "damage", [("{", ""), ('"ByteLevel"', '"Nothing"')], ids=["no JSON", "no such part of a tokenizer"]
)
def test_a_damaged_tokenizer_is_one_line(damage: tuple[str, str], tmp_path: Path) -> None:
    file = make_pair("llama", tmp_path, changes=()).base / "tokenizer.json"
    file.write_text(file.read_text().replace(*damage))
    with pytest.raises(CheckpointError, match="base: its tokenizer cannot be loaded: "):
        text_of(tmp_path, "self", name="base")


def test_ids_without_a_row_in_the_embedding_are_refused(models: Path, tmp_path: Path) -> None:
    make_pair("llama", tmp_path, changes=())
    make_tokenizer(added_tokens=1).save_pretrained(tmp_path / "base")
    (tmp_path / "corpus.txt").write_text("<added-0>" + TEXT)
    with pytest.raises(CheckpointError, match="its tokenizer gives id 259 and its embedding has 259 rows"):
        text_of(tmp_path, tmp_path / "corpus.txt", name="base")


@pytest.mark.parametrize(("samples", "length"), [(0, 10), (-1, 10), (10, 1)])
def test_counts_out_of_range_are_refused(samples: int, length: int) -> None:
    with pytest.raises(UsageError, match="give at least"):
        Calibration("self", samples, length)


def test_sequences_longer_than_the_model_takes_are_refused(models: Path) -> None:
    decoder = open_decoder(models / "base")
    with pytest.raises(UsageError, match=r"length of 257 tokens: .* takes at most 256"):
        calibration_text(Calibration("self", 4, 257), decoder)


@pytest.mark.parametrize(("count", "held"), [(320, 32), (101, 11), (50, 8), (16, 8), (5, 2), (1, 0)])
def test_the_last_tenth_or_eight_are_held_out_but_no_more_than_half(count: int, held: int) -> None:
    sequences = [torch.tensor([number]) for number in range(count)]
    train, validation, test = split_text(sequences)
    assert [int(ids) for ids in train] == list(range(count - held))
    assert [int(ids) for ids in validation] == list(range(count - held, count, 2))
    assert [int(ids) for ids in test] == list(range(count - held + 1, count, 2))


def test_batches_hold_sequences_of_one_length_in_order() -> None:
    sequences = [torch.full((length,), number) for number, length in enumerate([4, 4, 6, 4, 6])]
    batches = batched(sequences, max_tokens=8)
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [3], [2], [4]]
    assert [batch.shape[1] for batch in batches] == [4, 4, 6, 6]
