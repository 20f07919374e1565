"""Calibration text as people have it: every form of records, every kind of file, and one line for each that is bad."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from compressor.config import Calibration
from compressor.fit.calibration import calibration_text
from compressor.fit.record_files import file_records
from deltastore.errors import PeraxisError, UsageError
from tests.compressor.helpers.decoders import open_decoder
from tests.helpers.tiny_models import Change, make_pair, make_tokenizer

LENGTH = 20
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}:{{ c.function.arguments.x }}){% endfor %}{% endfor %}"
)
TOKENIZER = make_tokenizer()
TALE = "Once upon a time there was a text. " * 20
USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": TALE}
BAD = {"role": "assistant", "content": "a worse answer"}
CALL = {"name": "add", "arguments": '{"x": 5}'}
TOOLS = [{"name": "add", "description": "adds", "parameters": {"type": "object"}}]
CHAT = f"<user>Q<assistant>{TALE}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`finetune-0` has a chat template, `base` has none."""
    directory = tmp_path_factory.mktemp("models")
    make_pair("llama", directory, changes=(Change(chat_template=TEMPLATE),))
    return directory


def text_of(models: Path, source: Path, name: str = "finetune-0") -> str:
    """Return the calibration text, which begins with the file's first record."""
    sequences = calibration_text(Calibration(str(source), 16, LENGTH), open_decoder(models / name))
    return str(TOKENIZER.decode([token for ids in sequences for token in ids.tolist()]))


def write_json(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


FORMS = [
    ({"text": TALE}, TALE),
    ({"prompt": "Q", "completion": TALE}, f"Q{TALE}"),
    ({"prompt": [USER], "completion": [ANSWER]}, CHAT),
    ({"prompt": [USER], "completion": TALE}, CHAT),
    ({"messages": [USER, ANSWER]}, CHAT),
    ({"messages": json.dumps([USER, ANSWER])}, CHAT),
    ({"messages": [USER, ANSWER], "text": "beside"}, CHAT),
    ({"messages": [USER, ANSWER], "tools": [{"type": "function", "function": TOOLS[0]}]}, f"[add]{CHAT}"),
    ({"messages": [USER, ANSWER], "tools": json.dumps(TOOLS)}, f"[add]{CHAT}"),
    ({"messages": [USER, ANSWER], "functions": TOOLS}, f"[add]{CHAT}"),
    (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}, ANSWER]},
        f"<user>Q<assistant>(add:5)<assistant>{TALE}",
    ),
    ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": TALE}]}, CHAT),
    (
        {
            "system": "Be kind.",
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"x": 5}})},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": TALE},
            ],
            "tools": json.dumps(TOOLS),
        },
        f"[add]<system>Be kind.<user>Q<assistant>(add:5)<tool>7<assistant>{TALE}",
    ),
    ({"conversations": [USER, ANSWER]}, CHAT),
    ({"instruction": "Q", "input": "", "output": TALE}, CHAT),
    ({"instruction": "Q", "input": "I", "output": TALE, "text": "beside"}, f"<user>Q\nI<assistant>{TALE}"),
    (
        {"instruction": "Q", "output": TALE, "system": "S", "history": [["A", "B"]]},
        f"<system>S<user>A<assistant>B<user>Q<assistant>{TALE}",
    ),
    ({"prompt": "Q", "chosen": TALE, "rejected": "no"}, f"Q{TALE}"),
    ({"chosen": TALE, "rejected": "no"}, TALE),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]}, CHAT),
    ({"chosen": [USER, ANSWER], "rejected": [USER, BAD]}, CHAT),
    ({"prompt": "Q", "chosen": [USER, ANSWER], "rejected": [USER, BAD]}, CHAT),
    ({"instruction": "Q", "input": "I", "chosen": TALE, "rejected": "no"}, f"<user>Q\nI<assistant>{TALE}"),
    (
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": TALE},
            "rejected": {"from": "gpt", "value": "no"},
        },
        CHAT,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("record", "expected"), FORMS)
def test_every_form_is_rendered_as_the_fine_tune_reads_it(
    record: Any, expected: str, models: Path, tmp_path: Path
) -> None:
    text = text_of(models, write_json(tmp_path / "records.jsonl", record))
    assert text.startswith(expected[: 16 * LENGTH])


def test_a_rejected_completion_is_left_out(models: Path, tmp_path: Path) -> None:
    records = [
        {"prompt": "Q", "completion": "bad" * 100, "label": False},
        {"prompt": "Q", "completion": TALE, "label": True},
    ]
    assert text_of(models, write_json(tmp_path / "kto.jsonl", *records)).startswith(f"Q{TALE}"[:300])


def test_a_record_with_its_text_beside_needs_no_template(models: Path, tmp_path: Path) -> None:
    record = {"instruction": "Q", "output": "A", "text": TALE}
    assert text_of(models, write_json(tmp_path / "alpaca.jsonl", record), "base").startswith(TALE[:300])


@pytest.mark.parametrize(
    ("record", "keys", "nearest"),
    [
        ({"question": "Q", "answer": "A"}, "'question' (string), 'answer' (string)", '{"prompt", "completion"}'),
        ({"content": "A", "id": 5}, "'content' (string), 'id' (number)", '{"text"}'),
        ({"mesages": [USER]}, "'mesages' (array)", '{"messages"}'),
        ({"conversation": []}, "'conversation' (array)", '{"conversations"}'),
        ({"instruction": "Q", "context": "", "response": "A"}, "'instruction'", '{"instruction", "input", "output"}'),
        ({"prompt": "Q", "accepted": "A", "rejected": "B"}, "'prompt'", '{"prompt", "chosen", "rejected"}'),
        ({"text": 5}, "'text' (number)", '{"text"}'),
        ({}, "none", '{"text"}'),
    ],
)  # fmt: skip
def test_a_record_of_no_known_form_is_named_with_its_keys_and_the_nearest_form(
    record: Any, keys: str, nearest: str, models: Path, tmp_path: Path
) -> None:
    path = write_json(tmp_path / "records.jsonl", {"text": "fine"}, record)
    with pytest.raises(UsageError) as caught:
        text_of(models, path)
    assert str(caught.value).startswith(f"{path}: line 2: a record is ")
    assert f"has the keys {keys}" in str(caught.value)
    assert str(caught.value).endswith(f"name them as in {nearest}, the nearest form")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [{"speaker": "me", "text": "A"}]}, r"one has the keys 'speaker' \(string\), 'text'"),
        ({"conversations": [{"from": "narrator", "value": "A"}]}, "a turn is from 'narrator'"),
        ({"messages": [USER], "tools": "no JSON"}, "tools are a list of objects"),
        ({"messages": [USER], "tools": [3]}, "tools are a list of objects"),
        ({"instruction": "Q", "output": "A", "history": ["A"]}, "`history` is a list of pairs"),
        ({"text": "\ud800"}, "tokenizer cannot encode it"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "cannot encode it"),
    ],
)
def test_a_damaged_record_is_one_line(record: Any, reason: str, models: Path, tmp_path: Path) -> None:
    with pytest.raises(PeraxisError, match=rf"line 1: .*{reason}") as caught:
        text_of(models, write_json(tmp_path / "records.jsonl", record))
    assert "\n" not in str(caught.value)


def csv_bytes(rows: list[list[str]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows(rows)
    return out.getvalue().encode()


def parquet_bytes(columns: dict[str, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out, **options)
    return out.getvalue()


LINES = "".join(f"{json.dumps({'text': TALE + str(number)})}\n" for number in range(3)).encode()
ARRAY = [{"text": TALE + str(number), "id": number} for number in range(3)]
FILES = {
    "lines.jsonl": LINES,
    "lines.ndjson": LINES,
    "LINES.JSONL": LINES,
    "lines.json": LINES,
    "corpus.txt": LINES,
    "corpus": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "array.json": json.dumps(ARRAY).encode(),
    "pretty.JSON": json.dumps(ARRAY, indent=2).encode(),
    "pretty-crlf.json": json.dumps(ARRAY, indent=2).replace("\n", "\r\n").encode(),
    "array.jsonl": json.dumps(ARRAY).encode(),
    "array.txt": b"\xef\xbb\xbf" + json.dumps(ARRAY, indent=1).encode(),
    "objects.json": "\n".join(json.dumps(each, indent=2) for each in ARRAY).encode(),
    "table.csv": csv_bytes([["id", "text"], *([str(each["id"]), str(each["text"])] for each in ARRAY)]),
    "TABLE.CSV": b"\xef\xbb\xbf" + csv_bytes([["text", "id"], *([str(each["text"]), "0"] for each in ARRAY)]),
    "table.tsv": csv_bytes([["text", "id"], *([str(each["text"]), "0"] for each in ARRAY)], "\t"),
    "lines.jsonl.gz": gzip.compress(LINES),
    "lines.jsonl.GZ": gzip.compress(LINES),
    "unnamed-gzip.jsonl": gzip.compress(LINES),
    "array.json.gz": gzip.compress(json.dumps(ARRAY).encode()),
    "table.csv.gz": gzip.compress(csv_bytes([["text"], *([str(each["text"])] for each in ARRAY)])),
    "rows.parquet": parquet_bytes({"text": [each["text"] for each in ARRAY], "id": [1, 2, 3]}),
    "ROWS.PARQUET": parquet_bytes({"id": [1, 2, 3], "text": [each["text"] for each in ARRAY]}),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_its_records(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert [record["text"] for _, record in file_records(tmp_path / name, 1000)] == [
        each["text"] for each in ARRAY
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("lines.jsonl", "array.json", "objects.json", "corpus.txt", "table.csv", "table.tsv"),
        *("lines.jsonl.gz", "rows.parquet"),
    ],
)
def test_each_format_gives_the_text_of_its_records(name: str, models: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert text_of(models, tmp_path / name).startswith((TALE + "0")[:320])


def test_plain_text_is_read_with_gzip_bom_and_crlf(models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.TXT.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + b"caf\xc3\xa9 [1]\r\n" * 99))
    assert text_of(models, tmp_path / "corpus.TXT.gz").startswith("café [1]\ncafé [1]\n")


@pytest.mark.parametrize("text", ["{ a set } of things ", "[1] a footnote. ", "[{x}, {y}] of sets "])
def test_text_that_begins_like_json_stays_text(text: str, models: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(text * 40)
    assert text_of(models, tmp_path / "corpus.txt").startswith(text * 3)


def test_conversations_are_read_from_parquet_without_the_nulls_of_their_type(
    models: Path, tmp_path: Path
) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}
    (tmp_path / "chats.parquet").write_bytes(parquet_bytes({"messages": [[USER, called, ANSWER]], "n": [1]}))
    ((_, record),) = file_records(tmp_path / "chats.parquet", 1000)
    assert record["messages"] == [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}, ANSWER]
    assert text_of(models, tmp_path / "chats.parquet").startswith(
        f"<user>Q<assistant>(add:5)<assistant>{TALE}"[:300]
    )


def test_conversations_are_read_from_a_table(models: Path, tmp_path: Path) -> None:
    rows = [["messages", "tools"], [json.dumps([USER, ANSWER]), json.dumps(TOOLS)]]
    (tmp_path / "chats.csv").write_bytes(csv_bytes(rows))
    assert text_of(models, tmp_path / "chats.csv").startswith(f"[add]{CHAT}"[:300])


def test_values_are_found_wherever_the_parts_of_a_file_end(tmp_path: Path) -> None:
    """Records of up to several times a part, with numbers between them in the array."""
    draw = random.Random(0)
    records = [
        draw.choice([{"text": 'é\n"' * draw.randrange(1_200_000)}, draw.randrange(10**9), {"text": "b"}])
        for _ in range(12)
    ]
    (tmp_path / "array.json").write_text(
        json.dumps(records, indent=draw.choice([None, 1]), ensure_ascii=False)
    )
    assert [record for _, record in file_records(tmp_path / "array.json", 1000)] == records


def test_parquet_without_pyarrow_says_what_to_install(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pyarrow.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{':'.join(filter(None, sys.path))}")
    (tmp_path / "rows.parquet").write_bytes(FILES["rows.parquet"])
    with pytest.raises(
        UsageError, match=r"rows\.parquet: Parquet needs pyarrow.*pip install 'peraxis\[eval\]'"
    ):
        text_of(models, tmp_path / "rows.parquet")
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    assert text_of(models, tmp_path / "lines.jsonl").startswith(TALE[:300])


def repeated(part: bytes, num_bytes: int, first: bytes = b"") -> bytes:
    """Return a gzip file of many equal members, which is made fast."""
    return gzip.compress(first) + gzip.compress(part, 1) * (num_bytes // len(part))


ZEROS, NESTED = bytes(16 << 20), b'[[],{"text":1}],' * (1 << 20)


BROKEN = LINES + b'{"text": "unfinish\n' + LINES
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty.jsonl": (b"", "it holds no records"),
    "empty.json": (b"[]", "it holds no records"),
    "empty.csv": (b"", "it holds no records"),
    "header.csv": (b"text,id\n", "it holds no records"),
    "empty.parquet": (b"", "it holds no"),
    "rowless.parquet": (parquet_bytes({"text": pyarrow.array([], "string")}), "it holds no records"),
    "empty.txt": (b"", "it holds no text"),
    "empty.txt.gz": (gzip.compress(b""), "it holds no text"),
    "broken.jsonl": (BROKEN, "line 4: no JSON: "),
    "broken.json": (b'[{"text": "a"},\n{"text": "b},\n{"text": "c"}]', r"record 2 \(line 2\): no JSON: "),
    "commaless.json": (b'[{"text": "a"}\n{"text": "b"}]', r"record 2 \(line 2\): no JSON: a comma"),
    "torn.json": (json.dumps(ARRAY).encode()[:-30], r"record 3 \(line 1\): no JSON: "),
    "torn-between.json": (
        b'[{"text": "a"},',
        r"record 2 \(line 1\): no JSON: the file ends within the array",
    ),
    "more.json": (b'[{"text": "a"}] {"text": "b"}', "more behind the array's end"),
    "broken.csv": (b'text,id\na,1\n"b,2\nc,3\n', "no CSV: "),
    "short.csv": (b"text,id\na,1\nb\n", "line 3: 1 values, and the first line names 2"),
    "quoted.csv": (b'text,id\na,1\n"b"c,2\n', "line 3: no CSV: "),
    "torn.jsonl.gz": (gzip.compress(random.Random(0).randbytes(99).hex().encode() * 999)[:-99], "cut off"),
    "damaged.jsonl.gz": (gzip.compress(LINES)[:20] + b"\xff" * 20, "damaged"),
    "torn.parquet": (FILES["rows.parquet"][:-20], r"it is damaged or cut off \("),
    "damaged.parquet": (b"PAR1" + bytes(400) + FILES["rows.parquet"][404:], r"it is damaged or cut off \("),
    "latin.jsonl": (LINES + b'{"text": "caf\xe9"}', rf"it is not UTF-8 text \(byte {len(LINES) + 13}\)"),
    "latin.csv": (b"text\ncaf\xe9\n", r"it is not UTF-8 text \(byte 8\)"),
    "latin.json": (b'[{"text": "caf\xe9"}]', r"it is not UTF-8 text \(byte 14\)"),
    "latin.txt.gz": (gzip.compress(b"a" * (1 << 20) + b"\xe9"), r"it is not UTF-8 text \(byte 1048576\)"),
    "wide.txt": ("text".encode("utf-16"), "it is UTF-16 text: convert it"),
    "wide.csv": ("text\na".encode("utf-16"), "it is UTF-16 text: convert it"),
    "packed.jsonl.zst": (b"\x28\xb5\x2f\xfd" + bytes(9), "compressed by zstd"),
    "packed.zip": (b"PK\x03\x04" + bytes(9), "a zip file"),
    "columns.csv": (
        b",".join(b"c%d" % n for n in range(1_000_000)) + b"\n",
        "1000000 columns, more than 10000",
    ),
    "columns.parquet": (
        parquet_bytes({f"c{n}": [1] for n in range(10_001)}),
        "10001 columns, more than 10000",
    ),
    "zeros.gz": (repeated(ZEROS, 2 << 30), "NUL bytes"),
    "zeros.jsonl.gz": (repeated(ZEROS, 2 << 30, LINES), "NUL bytes"),
    "zeros.csv.gz": (repeated(ZEROS, 2 << 30, b"text\n"), "NUL bytes"),
    "spaces.jsonl.gz": (gzip.compress(b" " * (64 << 20)), "line 1: more than 32 MiB"),
    "line.csv.gz": (gzip.compress(b"text\n" + b"a" * (64 << 20)), "more than 32 MiB"),
    "nested.jsonl": (b'{"text": ' + b"[" * 100_000, "line 1: no JSON"),
    "nested.json": (b'[{"text": ' + b"[" * 100_000, "record 1 .*no JSON"),
    "nesting.json.gz": (repeated(NESTED, 1 << 30, b'{"messages": ['), "more than 32 MiB, which"),
    "digits.jsonl": (b'{"text": ' + b"1" * 10_000 + b"}", "line 1: no JSON"),
}


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A Parquet file of some KB, whose 4096 rows are the same 4 MiB."""
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4096, "int32"), ["a" * (4 << 20)])
    return parquet_bytes({"text": text}, compression="zstd")


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_at_fault_is_one_line_within_bounded_memory(name: str, models: Path, tmp_path: Path) -> None:
    content, reason = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    with within_memory(), pytest.raises(UsageError, match=rf"{name}: .*({reason})") as caught:
        list(file_records(tmp_path / name, 2 << 20))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_rows_of_a_bomb_are_read_as_far_as_they_are_needed(models: Path, bomb: bytes, tmp_path: Path) -> None:
    (tmp_path / "bomb.parquet").write_bytes(bomb)
    assert len(bomb) < 1 << 20
    with within_memory():
        assert set(text_of(models, tmp_path / "bomb.parquet")) == {"a"}


def test_a_group_of_rows_larger_than_the_memory_is_one_line(tmp_path: Path) -> None:
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64, "int32"), ["a" * (64 << 20)])
    (tmp_path / "bomb.parquet").write_bytes(parquet_bytes({"text": text}, compression="zstd"))
    with (
        within_memory(),
        pytest.raises(UsageError, match=r"bomb\.parquet: .*1024 MiB of memory"),
    ):
        list(file_records(tmp_path / "bomb.parquet", 1000))


@contextmanager
def within_memory() -> Iterator[None]:
    """Check the growth of this process's memory and the memory of its children, which begins with this process's."""
    before, children_before = most_bytes(resource.RUSAGE_SELF), most_bytes(resource.RUSAGE_CHILDREN)
    yield
    assert most_bytes(resource.RUSAGE_SELF) - before < 400 << 20
    # Linux counts every child that this process has waited for, also those of earlier tests.
    assert most_bytes(resource.RUSAGE_CHILDREN) <= max(children_before, before + (1200 << 20))


def most_bytes(who: int) -> int:
    """Return the most resident bytes so far of this process, or of the largest of its children that have ended."""
    return resource.getrusage(who).ru_maxrss << 10


def test_empty_records_without_end_are_too_little_text(models: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(parquet_bytes({"text": [""] * 1_000_000}))
    with pytest.raises(UsageError, match="its text makes 0 sequences"):
        text_of(models, tmp_path / "rows.parquet")


def test_a_reader_that_is_left_ends(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_bytes(LINES * 10_000)
    before = set(psutil.Process().children())
    records = file_records(tmp_path / "lines.jsonl", 1000)
    assert next(records)[0].endswith("line 1")
    (reader,) = set(psutil.Process().children()) - before
    records.close()
    assert not reader.is_running()
