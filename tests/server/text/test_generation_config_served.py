"""Generation configs over HTTP: obeyed unless the client sets a field, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench.engine import publish
from compressor.config import CompressConfig
from compressor.pipeline import compress
from deltastore.registry import Registry
from tests.server.helpers.live_server import Artifacts, LiveServer, error_of

HELLO_TOKENS = 5


@pytest.fixture
def made(artifacts: Artifacts, tmp_path: Path) -> Any:
    """Return a function that makes an artifact with a generation config."""

    def make(config: dict[str, Any]) -> Path:
        finetune, out = tmp_path / "finetune", tmp_path / "delta.safetensors"
        shutil.copytree(artifacts.base.parent / "finetune-0", finetune)
        (finetune / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, **config}))
        # Without its checks, because some of these configs are refused.
        with patch("compressor.pipeline.check_written"):
            compress(CompressConfig(str(artifacts.base), str(finetune), out, method="scalar"))
        return out

    return make


def test_what_cannot_be_obeyed_is_refused_at_upload_and_in_older_versions_at_a_call(
    server: LiveServer, made: Any
) -> None:
    artifact = made({"num_beams": 4})
    uploaded = server.upload("beams", artifact)
    publish(Registry(server.registry), artifact, "older-beams")
    asked = server.generate("older-beams", max_new_tokens=1)
    for reply in (uploaded, asked):
        assert reply.status_code == 400, reply.text
        error = error_of(reply)
        assert error["code"] == "invalid_artifact"
        assert (
            "num_beams is 4, which this server cannot obey: leave it out, or set it to 1" in error["message"]
        )


def test_a_token_that_there_is_not_is_refused_at_upload(server: LiveServer, made: Any) -> None:
    reply = server.upload("no-such-token", made({"bad_words_ids": [[3, 999]]}))
    assert reply.status_code == 400
    assert "bad_words_ids holds the token id 999, not below 259" in error_of(reply)["message"]


def test_a_config_is_obeyed_and_the_client_s_fields_win(server: LiveServer, made: Any) -> None:
    plain = server.generate("plain", max_new_tokens=40).json()["outputs"][0]
    text, ids = plain["text"], plain["token_ids"]
    # A stop string that is not at the beginning of the text.
    stop = next(char for char in text[3:] if char not in text[:3] and char.isprintable())
    config = {"max_length": HELLO_TOKENS + 30, "stop_strings": [stop]}
    assert server.upload("stops", made(config)).status_code == 201
    ended = server.generate("stops").json()["outputs"][0]
    assert (ended["text"], ended["finish_reason"]) == (text[: text.index(stop)], "stop")
    whole = server.generate("stops", stop=[]).json()["outputs"][0]
    assert whole["token_ids"] == ids[:30]
    assert server.token_ids("stops", stop=[], max_new_tokens=35) == ids[:35]
    # As long as the config lets a sequence become.
    refused = server.generate("stops", prompt="a" * (HELLO_TOKENS + 30))
    assert refused.status_code == 400
    assert (
        "max_length of default/stops@1 is 35: shorten the prompt, or set max_new_tokens"
        in error_of(refused)["message"]
    )
    assert server.generate("stops", prompt="a" * 40, max_new_tokens=1).status_code == 200


def test_rules_hold_for_every_sequence_and_give_way_to_a_response_format(
    server: LiveServer, made: Any
) -> None:
    banned = list(range(90, 110))
    artifact = made({"suppress_tokens": banned, "no_repeat_ngram_size": 1, "do_sample": True})
    assert server.upload("ruled", artifact).status_code == 201
    outputs = server.generate("ruled", temperature=1, n=4, seed=1, max_new_tokens=30).json()["outputs"]
    for output in outputs:
        ids = output["token_ids"]
        assert not set(ids) & set(banned)
        assert len(set(ids)) == len(ids)
    # The only answer has each letter twice.
    schema = {"type": "string", "enum": ["aabbccddee"]}
    form = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
    body = {"model": "ruled", "prompt": "hello", "response_format": form, "max_tokens": 40}
    reply = server.client.post("/v1/completions", json=body)
    assert reply.json()["choices"][0]["text"].strip() == '"aabbccddee"', reply.text
