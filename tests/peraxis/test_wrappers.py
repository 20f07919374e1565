"""Every command on tiny wrappers: compress, eval, merge, serve, push and chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peraxis.cli import run
from server.text.tokenizer import LoadedTokenizer
from tests.compressor.helpers.evaluating import document, make_evaluated
from tests.helpers.tiny_models import CHAT_TEMPLATE, WRAPPERS, Change, load_whole, make_pair, make_tokenizer
from tests.helpers.wrapper_forms import text_alone
from tests.server.helpers.live_server import error_of, live_server
from tests.server.helpers.served import serving

PROMPT, NUM_TOKENS = "hello", 12
# The one that is served over HTTP, which has towers for images and for sound.
OVER_HTTP = "gemma4"
Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True, slots=True)
class Compressed:
    """A base, the deltas of its fine-tunes, and what transformers answers to the prompt."""

    base: Path
    deltas: Mapping[str, Path]
    tokens: Mapping[str | None, list[int]]  # of each merged checkpoint; None is the base


def compressed(architecture: str, directory: Path) -> Compressed:
    """Compress and merge two fine-tunes by commands: `whole` has the base's form, `alone` is a text model alone."""
    models = make_pair(architecture, directory, seed=5, changes=(Change(chat_template=CHAT_TEMPLATE),) * 2)
    finetunes = {"whole": models.finetunes[0], "alone": text_alone(models.finetunes[1], directory / "alone")}
    deltas = {name: directory / f"{name}.safetensors" for name in finetunes}
    tokens: dict[str | None, list[int]] = {None: generated(models.base)}
    for name, finetune in finetunes.items():
        pair = ("--base", str(models.base), "--finetune", str(finetune))
        assert run(["compress", *pair, "--out", str(deltas[name]), "--calibration", "none"]) == 0
        merged = directory / f"merged-{name}"
        made = ("--base", str(models.base), "--delta", str(deltas[name]), "--out", str(merged))
        assert run(["merge", *made, "--dtype", "float32"]) == 0
        tokens[name] = generated(merged)
    assert len({*map(tuple, tokens.values())}) == 3
    return Compressed(models.base, deltas, tokens)


@torch.inference_mode()
def generated(directory: Path) -> list[int]:
    """Return the greedy tokens of transformers' own loading."""
    ids = torch.tensor([make_tokenizer()(PROMPT)["input_ids"]])
    model = load_whole(directory)
    output = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    found: list[int] = output[0, ids.shape[1] :].tolist()
    return found


def test_a_wrapper_is_compressed_merged_pushed_and_asked(tmp_path: Path, capsys: Captured) -> None:
    made = compressed(OVER_HTTP, tmp_path)
    with live_server(made.base, tmp_path / "registry") as server:
        for name, delta in made.deltas.items():
            assert run(["push", str(delta), "--name", name, "--url", server.url]) == 0
        for variant, tokens in made.tokens.items():
            assert server.token_ids(variant, prompt=PROMPT, max_new_tokens=NUM_TOKENS) == tokens
        capsys.readouterr()
        options = [
            "--once",
            PROMPT,
            "--temperature",
            "0",
            "--max-tokens",
            "4",
            "--url",
            server.url,
            "--json",
        ]
        assert run(["chat", "--compare", "whole", "alone", *options]) == 0
        answers = json.loads(capsys.readouterr().out)["answers"]
        assert answers[0]["text"] != answers[1]["text"]
        for kind in ("image_url", "input_audio", "file"):
            content = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:,"}}]
            body = {"model": "whole", "messages": [{"role": "user", "content": content}]}
            reply = server.client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 400
            assert f"part of type '{kind}': only text is read here" in error_of(reply)["message"]


@pytest.mark.parametrize("architecture", sorted(WRAPPERS.keys() - {OVER_HTTP}))
def test_each_other_wrapper_is_compressed_merged_and_served(architecture: str, tmp_path: Path) -> None:
    made = compressed(architecture, tmp_path)
    # As the HTTP process loads it: its class is chosen by the wrapper's configuration.
    prompt = LoadedTokenizer.load(made.base, "the base").encode(PROMPT, 64, True, "prompt")
    with serving(made.base, tmp_path / "registry") as served:
        records = {name: served.publish(delta, name) for name, delta in made.deltas.items()}
        for variant, tokens in made.tokens.items():
            record = None if variant is None else records[variant]
            assert served.ask(record, prompt, max_new_tokens=NUM_TOKENS).token_ids == tokens


def test_a_wrapper_is_fitted_and_evaluated(tmp_path: Path, capsys: Captured) -> None:
    evaluated = make_evaluated(tmp_path, "mistral3", added_tokens=2)
    result = document(evaluated.args(), capsys)
    assert result["num_sequences"] == 4
    assert 0 < result["delta"]["kl"] < result["base"]["kl"]
