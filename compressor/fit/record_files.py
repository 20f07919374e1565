"""Read calibration records from files, in a process of bounded memory. Run as a program, this module is that process.

Imports no torch, and pyarrow for Parquet alone.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import zlib
from collections.abc import Generator, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, cast

from compressor.fit.records import FORM_KEYS, parsed
from deltastore.errors import UsageError

# Of the process that reads a file. Hostile files of a few KB stand for any number of bytes.
MAX_MEMORY_BYTES = 1 << 30
# A record is parsed whole.
MAX_RECORD_BYTES = 32 << 20
MAX_COLUMNS = 10_000
READ_BYTES = 1 << 20
FIRST_BYTES = 4096
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
BOM = b"\xef\xbb\xbf"
# The beginnings of files that are converted first, and the way to do so.
REFUSED: Mapping[bytes, str] = {
    b"\xff\xfe": "it is UTF-16 text: convert it to UTF-8 first",
    b"\xfe\xff": "it is UTF-16 text: convert it to UTF-8 first",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd: decompress it first",
    b"BZh": "it is compressed by bzip2: decompress it first",
    b"\xfd7zXZ": "it is compressed by xz: decompress it first",
    b"PK\x03\x04": "it is a zip file: unpack it first",
    b"ARROW1": "it is an Arrow file: write it as Parquet or JSON lines first",
}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
# The beginning of an object, or of an array of objects.
JSON_BEGINNING = re.compile(r'(\[\s*)?\{\s*["}]')
NO_SPACE = re.compile(r"[^ \t\r\n]")
DECODER = json.JSONDecoder()
MAX_KEY_CHARS = 256
MAX_REASON_CHARS = 200
# Of Parquet; rows may be of any size.
ROWS_AT_ONCE = 16
# A value of each of Parquet's common types.
EMPTY: Mapping[str, Any] = {
    "string": "",
    "large_string": "",
    "int64": 0,
    "int32": 0,
    "double": 0.0,
    "bool": False,
}
PYARROW = (
    "Parquet needs pyarrow, which comes with datasets: pip install 'peraxis[eval]', or give a .jsonl file"
)


def file_records(path: Path, max_chars: int) -> Generator[tuple[str, Any]]:
    """Yield the name of each record of a file, for errors, and the record; a file of plain text is one record.

    The file is read in another process, whose memory is bounded, as far as records are taken. Its first bytes tell
    gzip, Parquet and JSON apart, whatever its name says; names tell .csv and .tsv.

    Args:
        max_chars: how much of plain text is read.

    Raises:
        UsageError: a file that cannot be read, or a damaged record, by its line or row.
    """
    # Not those of `python -m`: a module of the working directory must not take the place of an installed one.
    command = [
        sys.executable,
        "-P",
        "-m",
        "compressor.fit.record_files",
        str(path.absolute()),
        str(max_chars),
    ]
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                where, record, error = json.loads(line)
                name = f"{path}: {where}" if where else str(path)
                if error is not None:
                    raise UsageError(f"{name}: {error}")
                if where is None:
                    return
                yield name, record
            raise UsageError(
                f"{path}: it cannot be read within {MAX_MEMORY_BYTES >> 20} MiB of memory: its reader ended with code "
                f"{process.wait()}: split it, or give a .jsonl file"
            )
        finally:
            process.kill()


class _Unreadable(Exception):
    """A file or record that cannot be read; `where` is its line or row, or empty."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason)
        self.where = where


def main(path: Path, max_chars: int) -> None:
    """Print each record of a file as ``[where, record, error]``, and at the end three nulls."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    where = None
    try:
        for where, record in _records_of(path, max_chars):
            _print(where, record, None)
        if where is None:
            raise _Unreadable("it holds no records: give another file, or `text='self'`")
        _print(None, None, None)
    except _Unreadable as error:
        _print(error.where, None, str(error))
    except MemoryError:
        after = f"behind {where}" if where else ""
        _print(after, None, f"reading it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory: split it")
    except OSError as error:
        _print("", None, f"{error.strerror or error}: give `text` a text file or a .jsonl file")


def _print(*outcome: Any) -> None:
    sys.stdout.write(f"{json.dumps(outcome, default=str)}\n")
    sys.stdout.flush()


def _records_of(path: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    """Yield the line or row of each record, and what is needed of the record."""
    with path.open("rb") as raw:
        stream: BinaryIO = raw
        if raw.read(len(GZIP)) == GZIP:
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        raw.seek(0)
        first = _read(stream, FIRST_BYTES)
        if way_out := next((way for magic, way in REFUSED.items() if first.startswith(magic)), None):
            raise _Unreadable(way_out)
        stream.seek(0)
        if first.startswith(PARQUET):
            if stream is not raw:
                raise _Unreadable("it is Parquet within gzip: decompress it first")
            yield from _parquet_rows(path)
            return
        name = path.name.lower().removesuffix(".gz")
        beginning = first.removeprefix(BOM).decode(errors="replace").lstrip()
        if delimiter := DELIMITERS.get(os.path.splitext(name)[1]):
            records = _csv_rows(stream, delimiter)
        elif name.endswith(JSON_SUFFIXES) or JSON_BEGINNING.match(beginning):
            is_lines = beginning[:1] != "[" and (name.endswith(JSON_SUFFIXES[:2]) or _is_value(beginning))
            records = _json_lines(stream) if is_lines else _json_values(stream)
        else:
            yield "", {"text": _text(stream, max_chars)}
            return
        for where, record in records:
            yield where, _needed(record)


def _needed(record: Any) -> Any:
    """Return a record without the values of keys that no form has; their types stay, for errors."""
    if not isinstance(record, dict):
        return record if isinstance(record, (str, int, float)) else type(record)()
    keys = list(record)[:MAX_COLUMNS]
    return {
        key[:MAX_KEY_CHARS]: record[key] if key in FORM_KEYS or record[key] is None else type(record[key])()
        for key in keys
    }


def _is_value(beginning: str) -> bool:
    """Return whether the first line is a JSON value, or longer than the beginning of a file that was read."""
    line, end, _ = beginning.partition("\n")
    return not end or parsed(line) is not None


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    """Read as many bytes, fewer at the end."""
    try:
        return stream.read(num_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _Unreadable(f"it is damaged or cut off ({error}): fetch it again") from error


def _checked(data: bytes) -> bytes:
    if b"\0" in data:
        raise _Unreadable("it holds NUL bytes and is no text: give another file")
    return data


def _not_utf8(offset: int) -> _Unreadable:
    return _Unreadable(f"it is not UTF-8 text (byte {offset}): convert it first")


def _chunks(stream: BinaryIO) -> Iterator[str]:
    """Yield the text of a file in parts."""
    decoder, offset = codecs.getincrementaldecoder("utf-8-sig")(), 0
    while True:
        data = _checked(_read(stream, READ_BYTES))
        offset += len(data)
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _not_utf8(offset - len(error.object) + error.start) from error
        if not data:
            return


def _lines(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers."""
    offset = 0
    for number in count(1):
        try:
            line = _checked(stream.readline(MAX_RECORD_BYTES + 1))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _Unreadable(
                f"it is damaged or cut off ({error}): fetch it again", f"line {number}"
            ) from error
        if not line:
            return
        if len(line) > MAX_RECORD_BYTES:
            raise _Unreadable(
                f"more than {MAX_RECORD_BYTES >> 20} MiB, which no record may have: split it",
                f"line {number}",
            )
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(offset + error.start) from error
        yield number, text.removeprefix("\ufeff") if number == 1 else text
        offset += len(line)


def _text(stream: BinaryIO, max_chars: int) -> str:
    text = ""
    for chunk in _chunks(stream):
        text += chunk
        if len(text) >= max_chars:
            break
    text = text.replace("\r\n", "\n")[:max_chars]
    if not text.strip():
        raise _Unreadable("it holds no text: give another file, or `text='self'`")
    return text


def _json_lines(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(stream):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _Unreadable(f"no JSON: {error}", f"line {number}") from error
            yield f"line {number}", record


def _json_values(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSON array, or of values behind each other, without holding the whole file."""
    text = _TextWindow(_chunks(stream))
    is_array = text.next_character() == "["
    if is_array:
        text.position += 1
    for number in count(1):
        character = text.next_character()
        is_behind_comma = is_array and number > 1 and character == ","
        if is_behind_comma:
            text.position += 1
            character = text.next_character()
        where = f"record {number} (line {text.line})"
        if is_array and not is_behind_comma and number > 1 and character not in ("]", ""):
            raise _Unreadable("no JSON: a comma is missing before it", where)
        if character == "]" and is_array:
            text.position += 1
            if text.next_character():
                raise _Unreadable(f"no JSON: there is more behind the array's end (line {text.line})")
            return
        if not character:
            if is_array:
                raise _Unreadable("no JSON: the file ends within the array: fetch it again", where)
            return
        yield where, text.value(where)


class _TextWindow:
    """A part of a text, which moves forward."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._text = ""
        self._first_line = 1
        self.position = 0  # in the part

    @property
    def line(self) -> int:
        """The number of the line at the position."""
        return self._first_line + self._text.count("\n", 0, self.position)

    def next_character(self) -> str:
        """Move to the next character that is no space and return it; an empty text at the end."""
        while True:
            found = NO_SPACE.search(self._text, self.position)
            if found is not None:
                self.position = found.start()
                return found[0]
            self.position = len(self._text)
            if not self._extend():
                return ""

    def value(self, where: str) -> Any:
        """Return the JSON value at the position and move behind it."""
        wanted = READ_BYTES
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self.position)
                # A number may go on in the next part.
                if end < len(self._text) or not self._extend():
                    self.position = end
                    return found
            except (ValueError, RecursionError) as error:
                size = len(self._text) - self.position
                if size > MAX_RECORD_BYTES or not self._extend():
                    reason = getattr(error, "msg", None) or str(error)
                    raise _Unreadable(f"no JSON: {reason}", where) from error
            # Twice as much, because the value is parsed from its beginning again.
            wanted *= 2
            while len(self._text) - self.position < wanted and self._extend():
                pass

    def _extend(self) -> bool:
        """Add the next chunk and drop what lies behind; False at the end."""
        chunk = next(self._chunks, "")
        self._first_line += self._text.count("\n", 0, self.position)
        self._text, self.position = self._text[self.position :] + chunk, 0
        return bool(chunk)


def _csv_rows(stream: BinaryIO, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table by the names in its first line."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    # Strict, because a quote that does not end would take the rest of the file for one field.
    rows = csv.reader((line for _, line in _lines(stream)), delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if len(names) > MAX_COLUMNS:
            raise _too_many_columns(len(names))
        for row in rows:
            if not row:
                continue
            if len(row) != len(names):
                raise _Unreadable(
                    f"{len(row)} values, and the first line names {len(names)} columns",
                    f"line {rows.line_num}",
                )
            yield f"line {rows.line_num}", dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise _Unreadable(f"no CSV: {error}", f"line {rows.line_num}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file, a few at a time; of columns that no form has only the type."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise _Unreadable(PYARROW) from error
    try:
        file = parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)
        if file.metadata.num_columns > MAX_COLUMNS:
            raise _too_many_columns(file.metadata.num_columns)
        others = {
            field.name: EMPTY.get(str(field.type), [])
            for field in file.schema_arrow
            if field.name not in FORM_KEYS
        }
        columns = [name for name in file.schema_arrow.names if name in FORM_KEYS]
        if not columns and file.metadata.num_rows:
            yield "row 1", others
            return
        rows = chain.from_iterable(
            batch.to_pylist() for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns, use_threads=False)
        )
        for number, row in enumerate(rows, 1):
            yield f"row {number}", {**others, **_without_nulls(row)}
    # Parquet's reader raises OSError for damaged pages, too.
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        raise _Unreadable(f"it is damaged or cut off ({reason}): fetch it again") from error


def _without_nulls(value: Any) -> Any:
    """Return a value without the null fields that a column's common type adds to its objects."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _too_many_columns(number: int) -> _Unreadable:
    return _Unreadable(f"it has {number} columns, more than {MAX_COLUMNS}: keep those that hold text")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
