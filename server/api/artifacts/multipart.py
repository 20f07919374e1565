"""Extract the one file of a `multipart/form-data` body while it arrives. Holds one network chunk, never the file."""

from __future__ import annotations

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.errors import InvalidRequest

FIELD = "file"


class FileField:
    """Incremental parser: takes the body in chunks and returns the bytes of its one field, `file`."""

    def __init__(self, content_type: str) -> None:
        """Raise InvalidRequest if the header names no valid boundary."""
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise InvalidRequest(
                "the multipart body has no boundary: let the HTTP client set Content-Type", FIELD
            )
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]
        self._num_parts = 0
        self._data: list[bytes] = []
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_part_data": lambda data, start, end: self._data.append(data[start:end]),
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the multipart boundary cannot be used: {error}", FIELD) from error

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the file's bytes in this chunk; raise InvalidRequest for invalid multipart data or another field."""
        self._data = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body cannot be read: {error}", FIELD) from error
        return self._data

    def finish(self) -> None:
        """Raise InvalidRequest unless the body is complete and held the file."""
        if not self._complete:
            raise InvalidRequest("the multipart body ends before its closing boundary: send it again", FIELD)
        if not self._num_parts:
            raise InvalidRequest(f"the multipart body has no field: send the artifact as {FIELD!r}", FIELD)

    def _add_to_header(self, side: int, data: bytes) -> None:
        self._header[side] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _begin_part(self) -> None:
        name = parse_options_header(self._headers.get(b"content-disposition"))[1].get(b"name", b"")
        self._headers = {}
        self._num_parts += 1
        if name != FIELD.encode() or self._num_parts > 1:
            shown = name.decode("utf-8", "replace")
            raise InvalidRequest(
                f"the form has a field {shown!r}: send one field, {FIELD!r}, and no other", shown
            )

    def _end(self) -> None:
        self._complete = True


async def file_of_form(body: AsyncIterator[bytes], content_type: str) -> AsyncIterator[bytes]:
    """Yield the bytes of the form's file while the body arrives; raise InvalidRequest as `FileField` does."""
    field = FileField(content_type)
    async for chunk in body:
        for data in field.feed(chunk):
            yield data
    field.finish()
