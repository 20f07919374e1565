"""The tokens of the base whose streams are constrained to JSON."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from bench.engine import SMALL
from bench.http.clients import OF_COMPLETIONS, StreamedRequest
from bench.http.subjects import SCHEMA, write_json_base


def test_every_token_is_text_and_a_character_of_json_has_one(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_json_base(tmp_path, SMALL))
    texts = tokenizer.batch_decode([[token] for token in range(SMALL.vocabulary)])
    assert all(text and text.isascii() for text in texts)
    document = json.dumps([{"name": "a b", "count": 3}])
    assert tokenizer.decode(tokenizer(document)["input_ids"]) == document
    assert len(tokenizer(document)["input_ids"]) == len(document)


def test_a_request_with_a_schema_asks_for_it_and_counts_chunks() -> None:
    request = StreamedRequest("p", 4, schema=SCHEMA)
    head, body = request.to_bytes("host").split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions ")
    assert json.loads(body)["response_format"]["json_schema"]["schema"] == SCHEMA
    assert request.markers is OF_COMPLETIONS
    assert b"response_format" not in StreamedRequest("p", 4, schema={}).to_bytes("host")
