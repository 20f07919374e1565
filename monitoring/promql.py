"""Builds PromQL expressions over a server's metrics. Knows the form of names and rates, not which metrics exist."""

from __future__ import annotations

from dataclasses import dataclass

from server.metrics.definitions import PREFIX


@dataclass(frozen=True, slots=True)
class Scope:
    """The targets that expressions select, and the window of their rates.

    Attributes:
        matchers: label matchers of the targets, without braces.
        window: a duration of PromQL, or Grafana's variable for one.
    """

    matchers: str
    window: str

    def over(self, window: str) -> Scope:
        """Return the same targets with another window."""
        return Scope(self.matchers, window)

    def up(self) -> str:
        """Return the selector of the series that Prometheus writes for each target."""
        return f"up{{{self.matchers}}}"

    def series(self, name: str, matchers: str = "") -> str:
        """Return the selector of a server's metric, which is named without its prefix."""
        return f"{PREFIX}{name}{{{','.join(filter(None, (self.matchers, matchers)))}}}"

    def process(self, name: str) -> str:
        """Return the selector of one of prometheus_client's metrics of processes."""
        return f"process_{name}{{{self.matchers}}}"

    def rate(self, name: str, matchers: str = "") -> str:
        """Return the growth per second of each series."""
        return f"rate({self.series(name, matchers)}[{self.window}])"

    def increase(self, name: str, matchers: str = "") -> str:
        """Return the growth of each series within the window."""
        return f"increase({self.series(name, matchers)}[{self.window}])"

    def total(self, name: str, matchers: str = "", by: str = "") -> str:
        """Return the growth per second, summed up by labels."""
        return summed(self.rate(name, matchers), by)

    def mean(self, name: str, matchers: str = "", by: str = "") -> str:
        """Return the mean observation of a histogram; nothing where there was none."""
        return ratio(self.total(f"{name}_sum", matchers, by), self.total(f"{name}_count", matchers, by))

    def quantile(self, share: float, name: str, matchers: str = "", by: str = "") -> str:
        """Return a quantile of a histogram by labels; NaN where there was no observation."""
        labels = ", ".join(filter(None, (by, "le")))
        return f"histogram_quantile({share}, {self.total(f'{name}_bucket', matchers, labels)})"


def summed(expression: str, by: str = "") -> str:
    """Return the sum by labels."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def ratio(part: str, whole: str) -> str:
    """Return a quotient without the series whose divisor is 0: while nothing happens there is no ratio."""
    return f"{part} / ({whole} > 0)"


def observed(quantile: str) -> str:
    """Return a quantile without the series that had no observation."""
    # No comparison is true of NaN.
    return f"{quantile} >= 0"
