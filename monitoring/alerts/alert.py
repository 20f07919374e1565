"""Alerts and thresholds as values. Knows no metric and no file format.

Texts name what is filled in later as `@name@`: a threshold, `@matchers@` or `@runbookUrl@`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PLACEHOLDER = re.compile(r"@(\w+)@")
# Label matchers of the targets that rules are about.
MATCHERS = "@matchers@"

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number or duration that an operator may change.

    Attributes:
        name: its key among the chart's values.
        default: a number, or a duration of PromQL.
        meaning: one line, with the unit.
    """

    name: str
    default: float | str
    meaning: str

    @property
    def placeholder(self) -> str:
        return f"@{self.name}@"


@dataclass(frozen=True, slots=True)
class Comparison:
    """An expression and the bound beyond which it contributes to an alert.

    Attributes:
        value: PromQL. A running server that has seen the events which it counts answers it with numbers.
        bound: PromQL of a scalar.
    """

    value: str
    operator: Literal["<", "<=", ">", ">="]
    bound: str

    @property
    def text(self) -> str:
        return f"({self.value}) {self.operator} {self.bound}"


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that fires while all comparisons of one of its cases hold.

    Attributes:
        name: without the prefix `Peraxis`.
        cases: alternatives. The comparisons of one case have the same labels.
        lasting: the threshold that says for how long they must hold.
        summary: one line for a page.
        description: the figures; Prometheus' template language.
    """

    name: str
    severity: Severity
    cases: tuple[tuple[Comparison, ...], ...]
    lasting: Threshold
    summary: str
    description: str

    @property
    def full_name(self) -> str:
        return f"Peraxis{self.name}"

    @property
    def anchor(self) -> str:
        """The anchor of the alert's section in the runbook."""
        return self.full_name.lower()

    @property
    def expression(self) -> str:
        # "and" binds closer than "or", and a comparison closer than both.
        return "\nor\n".join("\nand\n".join(each.text for each in case) for case in self.cases)


def fill(text: str, value_of: Callable[[str], str]) -> str:
    """Replace each placeholder by what `value_of` returns for its name."""
    return PLACEHOLDER.sub(lambda match: value_of(match[1]), text)
