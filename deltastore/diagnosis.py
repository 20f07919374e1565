"""Findings of `peraxis serve --check` and `peraxis doctor`, and how both print them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from deltastore.errors import PeraxisError

State = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The outcome of one check; a failed one names the way out."""

    subject: str
    state: State
    message: str


def diagnose(subject: str, check: Callable[[], str]) -> Diagnosis:
    """Run a check that returns what it found; an error of Peraxis is a failure."""
    try:
        return Diagnosis(subject, "ok", check())
    except PeraxisError as error:
        return Diagnosis(subject, "failed", " ".join(str(error).split()))


def has_failed(diagnoses: Sequence[Diagnosis]) -> bool:
    return any(diagnosis.state == "failed" for diagnosis in diagnoses)


def print_diagnoses(diagnoses: Sequence[Diagnosis], as_json: bool) -> None:
    """Print one line per check, or one JSON document."""
    if as_json:
        document = {"ok": not has_failed(diagnoses), "checks": [asdict(each) for each in diagnoses]}
        print(json.dumps(document, indent=2))
        return
    width = max(len(each.subject) for each in diagnoses)
    for each in diagnoses:
        print(f"{each.state:<6}  {each.subject:<{width}}  {each.message}")
