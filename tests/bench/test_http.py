"""Run the bench of HTTP on a tiny model, with real servers, and the tokens of its base whose streams are JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.client import OF_COMPLETIONS, StreamedRequest
from bench.engine import SMALL
from bench.harness import goal_table, table_of
from bench.http import (
    BESIDE,
    CONSTRAINED,
    ENGINE,
    FREE,
    HTTP,
    OPEN,
    RATES,
    SCHEMA,
    SECURED,
    SMALL_SCOPE,
    TIMES,
    Sample,
    Subject,
    goals,
    main,
    results,
    tiny_model,
    write_json_base,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.deploy
def test_streams_of_a_tiny_model_are_measured_over_http(tmp_path: Path) -> None:
    subjects = tiny_model(tmp_path, SMALL_SCOPE, baseline=None, repeats=1)
    (found,) = results(subjects)
    assert (found["who"], found["streams"], found["variants"]) == ("over HTTP", SMALL_SCOPE.num_tiny, 0)
    (sample,) = found["samples"]
    assert sample["tokens_per_s"] > 0
    assert "over HTTP" in table_of(RATES, subjects)
    assert "µs per token" in table_of(TIMES, subjects)


def test_goals_compare_figures_with_their_peers_and_a_missing_baseline_is_not_measured() -> None:
    names = [
        (ENGINE, 4),
        (HTTP, 4),
        (HTTP, 12),
        (FREE, 4),
        (CONSTRAINED, 4),
        (BESIDE, 4),
        (OPEN, 4),
        (SECURED, 4),
    ]
    sample = Sample(tokens_per_s=100.0, p50_gap_s=0.1, p99_gap_s=0.1, first_token_s=0.1, cpu_s={})
    halved = replace(sample, tokens_per_s=50.0)
    subjects = [
        Subject(name, streams, 0, lambda: sample, [halved if name == SECURED else sample])
        for name, streams in names
    ]
    assert [(goal.reached, goal.is_met) for goal in goals(subjects)] == [
        (1.0, True),
        (1.0, True),
        (None, None),
        (1.0, True),
        (1.0, True),
        (0.5, False),
    ]
    assert goal_table(goals(subjects)).count("not measured") == 1


@pytest.mark.deploy
def test_a_small_run_fills_its_tables_beside_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "http.json"
    main(["--small", "--repeats", "1", "--baseline", str(ROOT), "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    written = json.loads(text)
    assert {(one["who"], one["streams"], one["variants"]) for one in written["results"]["streams"]} == {
        *((who, streams, 0) for who in ("bare engine", "over HTTP") for streams in (1, 4)),
        ("bare engine", 4, 2),
        ("over HTTP", 4, 2),
        ("over HTTP", 12, 0),
        ("baseline over HTTP", 12, 0),
        ("free", 4, 0),
        ("constrained to JSON", 4, 0),
        ("free beside constrained", 4, 0),
        ("without keys", 4, 0),
        ("keys, limits, JSON logs", 4, 0),
    }
    assert all(
        sample["tokens_per_s"] > 0 for one in written["results"]["streams"] for sample in one["samples"]
    )
    assert all(figures["gaps_busy"] > 0 for figures in written["results"]["tokenizing"].values())
    assert [goal["limit"] for goal in written["goals"]] == [
        "at least 0.95",
        "at most 1.1",
        "at least 2",
        "at most 1.15",
        "at most 1.1",
        "at least 0.97",
    ]
    printed = capsys.readouterr().out
    assert "processor time, µs per token" in printed
    assert str(tmp_path) not in text + printed


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
