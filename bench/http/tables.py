"""Tables and goals of `bench.http`. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.http.subjects import BASELINE, BESIDE, CONSTRAINED, ENGINE, FREE, HTTP, OPEN, SECURED, Subject
from peraxis.demo.table import table

HEADS = ("streams", "variants", "")


def rate_table(subjects: Sequence[Subject]) -> str:
    rows = [
        (
            *_names(one),
            f"{one.median('tokens_per_s'):.0f}",
            *(f"{1e3 * one.median(figure):.1f}" for figure in ("p50_gap_s", "p99_gap_s", "first_token_s")),
        )
        for one in subjects
    ]
    return table((*HEADS, "tokens/s", "between tokens, ms", "p99, ms", "first token, ms"), rows)


def cpu_table(subjects: Sequence[Subject]) -> str:
    """Return the processor time per token by process, and the cores that are busy at the measured rate."""
    rows = []
    for one in subjects:
        times, rate = one.cpu_s(), one.median("tokens_per_s")
        parts = ", ".join(f"{part} {1e6 * seconds:.0f}" for part, seconds in times.items())
        cores, clients = rate * sum(times.values()), rate * times.get("clients", 0.0)
        rows.append((*_names(one), parts, f"{cores:.2f}", f"{clients:.2f}"))
    return table((*HEADS, "processor time, µs per token", "cores busy", "of them by clients"), rows)


def tokenizing_table(figures: Mapping[str, Mapping[str, float]], num_tokens: int) -> str:
    rows = [
        (
            name,
            *(f"{1e3 * one[key]:.1f}" for key in ("reply_p50_s", "quiet_p99_s", "busy_p99_s")),
            f"{one['busy_p99_s'] / one['quiet_p99_s']:.2f}",
        )
        for name, one in figures.items()
    ]
    return table(
        (f"{num_tokens} tokens, by", "tokenized in, ms", "others' p99, quiet, ms", "busy, ms", "ratio"), rows
    )


def goals(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Compare the figures with their limits; a figure without its peer is `None`."""
    found = {(one.name, one.num_streams, one.num_variants): one for one in subjects}
    most = max(one.num_streams for one in subjects if one.name == ENGINE)
    many = max(one.num_streams for one in subjects if one.name == HTTP)
    engine, http = found[ENGINE, most, 0], found[HTTP, most, 0]
    free, constrained, beside = (found[name, most, 0] for name in (FREE, CONSTRAINED, BESIDE))
    asked = [
        (
            f"{most} streams: tokens/s over HTTP / bare engine",
            _ratio(http, engine, "tokens_per_s"),
            "at least",
            0.95,
        ),
        (f"{most} streams: p99 over HTTP / bare engine", _ratio(http, engine, "p99_gap_s"), "at most", 1.1),
        (
            f"{many} streams of a tiny model: tokens/s / baseline",
            _ratio(found[HTTP, many, 0], found.get((BASELINE, many, 0)), "tokens_per_s"),
            "at least",
            2.0,
        ),
        (
            f"{most} streams: time per token, constrained to JSON / free",
            _ratio(free, constrained, "tokens_per_s"),
            "at most",
            1.15,
        ),
        (
            f"{most} streams: p99 of free ones, beside as many constrained / all free",
            _ratio(beside, free, "p99_gap_s"),
            "at most",
            1.1,
        ),
        (
            f"{most} streams: tokens/s with keys, limits and JSON logs / without",
            _ratio(found[SECURED, most, 0], found[OPEN, most, 0], "tokens_per_s"),
            "at least",
            0.97,
        ),
    ]
    return [
        {"goal": goal, "limit": f"{side} {limit:g}", "reached": value, "met": _met(value, side, limit)}
        for goal, value, side, limit in asked
    ]


def goal_table(subjects: Sequence[Subject]) -> str:
    words = {True: "met", False: "not met", None: "not measured"}
    rows = [
        (g["goal"], g["limit"], "" if g["reached"] is None else f"{g['reached']:.2f}", words[g["met"]])
        for g in goals(subjects)
    ]
    return table(("goal", "limit", "reached", ""), rows)


def results(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return all samples, for the JSON document."""
    return [
        {
            "who": one.name,
            "streams": one.num_streams,
            "variants": one.num_variants,
            "samples": [_rounded(asdict(sample)) for sample in one.samples],
        }
        for one in subjects
    ]


def _names(one: Subject) -> tuple[str, str, str]:
    return str(one.num_streams), str(one.num_variants or "base"), one.name


def _ratio(one: Subject, other: Subject | None, figure: str) -> float | None:
    return None if other is None else round(one.median(figure) / other.median(figure), 3)


def _met(value: float | None, side: str, limit: float) -> bool | None:
    if value is None:
        return None
    return value >= limit if side == "at least" else value <= limit


def _rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, Mapping) else round(value, 7)
        for name, value in figures.items()
    }
