"""Texts over HTTP, with tokenizers of SentencePiece's kind: spaces, cut characters, special tokens and `logprobs`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from compressor.config import CompressConfig
from compressor.pipeline import compress
from tests.helpers.tiny_models import Change, make_pair
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.tokenizer_kinds import gemma, mistral

TEMPLATE = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
# Of the base, and of the variant "own".
TOKENIZERS = {
    "base": PreTrainedTokenizerFast(tokenizer_object=mistral(), chat_template=TEMPLATE),
    "own": PreTrainedTokenizerFast(tokenizer_object=gemma(), chat_template=TEMPLATE),
}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
# The last tokens of the vocabulary, which has no others beyond them.
NUM_ROWS = max(map(len, TOKENIZERS.values()))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("texts")
    ends = {"stop_strings": ["the t"], "eos_token_id": None}
    models = make_pair("llama", directory, changes=(Change(generation=ends),), vocab_size=NUM_ROWS)
    TOKENIZERS["base"].save_pretrained(models.base)
    TOKENIZERS["own"].save_pretrained(models.finetunes[0])
    compress(CompressConfig(str(models.base), str(models.finetunes[0]), directory / "own", method="scalar"))
    with live_server(models.base, directory / "registry") as running:
        assert running.upload("own", directory / "own").status_code == 201
        yield running


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    """Return the choice of a whole reply, whose text a stream must have, too."""
    asked = {"temperature": 0, "max_tokens": 8, **body}
    reply = server.client.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    streamed = server.client.post("/v1/completions", json={**asked, "stream": True})
    *events, _ = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    parts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(parts) == choice["text"]
    return choice


def id_of(model: str, token: str) -> int:
    token_id = TOKENIZERS[model].convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def only(model: str, token: str) -> dict[str, int]:
    """Return a bias with which a model writes one token alone."""
    return {str(id_of(model, token)): 100}


@pytest.mark.parametrize("model", TOKENIZERS)
def test_an_answer_begins_with_the_space_of_its_first_token(texts: LiveServer, model: str) -> None:
    bias = only(model, "▁t")
    asked = {"model": model, "prompt": "the", "logit_bias": bias, "max_tokens": 2, "stop": []}
    assert complete(texts, **asked)["text"] == " t t"
    assert complete(texts, **asked, echo=True)["text"] == "the t t"


@pytest.mark.parametrize("model", TOKENIZERS)
def test_a_character_that_the_prompt_ends_within_is_whole(texts: LiveServer, model: str) -> None:
    *prompt, last = TOKENIZERS[model]("a漢")["input_ids"]
    asked = {"model": model, "prompt": prompt, "logit_bias": {str(last): 100}, "max_tokens": 1}
    assert complete(texts, **asked)["text"] == "漢"
    assert complete(texts, **asked, echo=True)["text"] == "a漢"


@pytest.mark.parametrize("model", TOKENIZERS)
def test_log_probabilities_name_all_tokens_that_were_asked_for(texts: LiveServer, model: str) -> None:
    prompt, high = "the cat", {str(id_of(model, name)): -100 for name, byte in BYTES.items() if byte >= 128}
    asked = {"model": model, "prompt": prompt, "max_tokens": 30, "temperature": 1, "seed": 1, "stop": []}
    choice = complete(texts, **asked, logit_bias=high, logprobs=20, echo=True, skip_special_tokens=False)
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert choice["text"].startswith(prompt)
    for token, logprob, top in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        assert len(top) == 20 + (logprob < min(list(top.values())[:20]))
        assert top[token] == logprob
    offsets = [*found["text_offset"], len(choice["text"])]
    assert [choice["text"][first:end] for first, end in pairwise(offsets)] == found["tokens"]


@pytest.mark.parametrize("model", TOKENIZERS)
def test_the_bytes_of_a_chat_s_tokens_are_its_text(texts: LiveServer, model: str) -> None:
    # Of bytes, only those that make no character: beside a wrong one, transformers shows none.
    others = {str(id_of(model, name)): -100 for name, byte in BYTES.items() if not 0x80 <= byte < 0xC0}
    body = {
        "model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 1, "seed": 2,
        "logprobs": True, "top_logprobs": 20, "skip_special_tokens": False, "stop": [], "logit_bias": others,
    }  # fmt: skip
    (choice,) = texts.client.post("/v1/chat/completions", json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    # Of wrong bytes, some are one replacement character together.
    shown = [
        re.sub("\ufffd+", "\ufffd", text)
        for text in (joined.decode(errors="replace"), choice["message"]["content"])
    ]
    assert shown[0] == shown[1]
    assert {len(entry["top_logprobs"]) for entry in content} == {20}
    tokens = [top["token"] for entry in content for top in entry["top_logprobs"]]
    assert "\ufffd" not in "".join(tokens)
    assert any(token.startswith("\\x") for token in tokens)


@pytest.mark.parametrize("model", TOKENIZERS)
def test_special_tokens_are_shown_on_request_and_always_stop(texts: LiveServer, model: str) -> None:
    asked = {
        "model": model,
        "prompt": "the",
        "logit_bias": only(model, "<end>"),
        "max_tokens": 3,
        "logprobs": 0,
    }
    hidden = complete(texts, **asked)
    assert (hidden["text"], hidden["finish_reason"]) == ("", "length")
    assert hidden["logprobs"]["tokens"] == ["<end>"] * 3
    assert complete(texts, **asked, skip_special_tokens=False)["text"] == "<end>" * 3
    for skips in (True, False):
        stopped = complete(texts, **asked, stop="d><", skip_special_tokens=skips)
        assert (stopped["text"], stopped["finish_reason"]) == ("" if skips else "<en", "stop")
        assert len(stopped["logprobs"]["tokens"]) == 2


def test_a_configs_stop_string_may_begin_in_the_prompt_and_a_clients_may_not(texts: LiveServer) -> None:
    asked = {
        "model": "own",
        "prompt": "so the",
        "logit_bias": only("own", "▁t"),
        "max_tokens": 3,
        "logprobs": 0,
    }
    own = complete(texts, **asked)
    assert (own["text"], own["finish_reason"], own["logprobs"]["tokens"]) == ("", "stop", [" t"])
    given = complete(texts, **asked, stop="the t")
    assert (given["text"], given["finish_reason"]) == (" t t t", "length")


def test_each_token_of_generate_has_its_bytes(texts: LiveServer) -> None:
    (output,) = texts.generate("own", max_new_tokens=20, logprobs=3, stop=[]).json()["outputs"]
    entries = [entry for token in output["logprobs"] for entry in (token, *token["top"])]
    for entry in entries:
        name = TOKENIZERS["own"].convert_ids_to_tokens(entry["token_id"])
        assert entry["bytes"] == ([BYTES[name]] if name in BYTES else list(entry["text"].encode()))
