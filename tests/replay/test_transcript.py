"""Times and ids make no difference of a replay; every other value does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replay.metrics import steady_metrics
from tests.replay.transcript import Transcript, differences


def transcript(answer: object, **secrets: str) -> Transcript:
    made = Transcript(secrets)
    made.add("question", answer)
    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"created": 5, "queue_s": 0.25}, {"created": 6, "queue_s": 0.5}),
        ("request 2d2b7e0d43c84f32a4f10f6d2d0e77a1", "request 00000000000000000000000000000000"),
        ("took 0.25 s", "took 3 s"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:50123"),
        ({"logprob": -0.12345678}, {"logprob": -0.12345679}),
        ({"id": "aB3dE6gH9", "type": "function"}, {"id": f"call_{24 * '0'}", "type": "function"}),
    ],
)
def test_times_ids_ports_and_rounding_do_not_count(before: Any, after: Any) -> None:
    assert list(differences(transcript(before), transcript(after))) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"version": 1}, {"version": 2}),
        ({"created": 5}, {"created": "yesterday"}),
        ({"created": 5}, {"created": None}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"error": None}, {}),
        ("sha256:" + 64 * "0", "sha256:" + 64 * "1"),
    ],
)
def test_every_other_value_and_the_order_of_fields_count(before: Any, after: Any) -> None:
    assert next(iter(differences(transcript(before), transcript(after)))) == "=== question"


def test_a_question_that_is_no_longer_asked_counts() -> None:
    assert next(iter(differences(transcript(1), Transcript({})))) == "=== question"


def test_a_directory_has_one_name_in_both() -> None:
    before, after = Transcript({"/tmp/a": "WORLD"}), Transcript({"/tmp/b": "WORLD"})
    for made, path in ((before, "/tmp/a/x"), (after, "/tmp/b/x")):
        made.add("question", path)
    assert list(differences(before, after)) == []


def test_a_title_is_used_once() -> None:
    with pytest.raises(ValueError, match="asked before"):
        transcript(1).add("question", 2)


def test_metrics_keep_every_series_and_the_values_of_what_was_asked() -> None:
    text = (
        '# HELP a b\npEraxis 3.0\nperaxis_uploads_total{result="created"} 2.0\nperaxis_step_seconds_sum 0.5\n'
    )
    assert steady_metrics(text) == (
        '# HELP a b\npEraxis ...\nperaxis_step_seconds_sum ...\nperaxis_uploads_total{result="created"} 2.0\n'
    )
