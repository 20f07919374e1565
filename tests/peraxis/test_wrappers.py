"""Every command on tiny wrappers: compress, eval, merge, serve, push and chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peraxis.cli import run
from tests.compressor.helpers.evaluating import document, make_evaluated
from tests.helpers.tiny_models import CHAT_TEMPLATE, WRAPPERS, Change, load_whole, make_pair, make_tokenizer
from tests.helpers.wrapper_forms import text_alone
from tests.server.helpers.live_server import error_of, live_server

NUM_TOKENS = 12
Captured = pytest.CaptureFixture[str]


@torch.inference_mode()
def generated(directory: Path, prompt: str) -> list[int]:
    """Return the greedy tokens of transformers' own loading."""
    ids = torch.tensor([make_tokenizer()(prompt)["input_ids"]])
    model = load_whole(directory)
    output = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    found: list[int] = output[0, ids.shape[1] :].tolist()
    return found


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_a_wrapper_is_compressed_merged_pushed_and_asked(
    architecture: str, tmp_path: Path, capsys: Captured
) -> None:
    models = make_pair(architecture, tmp_path, seed=5, changes=(Change(chat_template=CHAT_TEMPLATE),) * 2)
    # One fine-tune in the base's form, one as a text model alone.
    finetunes = {"whole": models.finetunes[0], "alone": text_alone(models.finetunes[1], tmp_path / "alone")}
    for name, finetune in finetunes.items():
        pair = ("--base", str(models.base), "--finetune", str(finetune))
        out = str(tmp_path / f"{name}.safetensors")
        assert run(["compress", *pair, "--out", out, "--calibration", "none"]) == 0
        made = ("--base", str(models.base), "--delta", out, "--out", str(tmp_path / f"merged-{name}"))
        assert run(["merge", *made, "--dtype", "float32"]) == 0
    with live_server(models.base, tmp_path / "registry") as server:
        for name in finetunes:
            assert (
                run(["push", str(tmp_path / f"{name}.safetensors"), "--name", name, "--url", server.url]) == 0
            )
        expected = {name: generated(tmp_path / f"merged-{name}", "hello") for name in finetunes}
        for name, tokens in expected.items():
            assert server.token_ids(name, max_new_tokens=NUM_TOKENS) == tokens
        base = generated(models.base, "hello")
        assert server.token_ids(max_new_tokens=NUM_TOKENS) == base
        assert len({str(each) for each in (base, *expected.values())}) == 3
        capsys.readouterr()
        options = [
            "--once",
            "hello",
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


def test_a_wrapper_is_fitted_and_evaluated(tmp_path: Path, capsys: Captured) -> None:
    evaluated = make_evaluated(tmp_path, "mistral3", added_tokens=2)
    result = document(evaluated.args(), capsys)
    assert result["num_sequences"] == 4
    assert 0 < result["delta"]["kl"] < result["base"]["kl"]
