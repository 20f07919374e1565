"""Remembers grammars that failed in lanes, and pauses new grammars of tenants whose grammars kill workers.

Event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from server.errors import InvalidRequest
from server.grammar.grammar import Grammar
from server.grammar.matching import Vocabulary
from server.text.variant_work import MAX_PAUSE_S, MIN_PAUSE_S

# Grammars of all tenants together, and tenants.
MAX_GRAMMARS = 4096
MAX_TENANTS = 1024
# A grammar may have failed because the machine had no time for it.
REMEMBERED_S = 300.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A tenant's grammar with one vocabulary.

    Failures are kept per tenant; else a tenant could have a grammar refused to others by failing with it.
    """

    tenant: str
    vocabulary: Vocabulary
    grammar: Grammar

    @property
    def key(self) -> tuple[str, Vocabulary, str]:
        return self.tenant, self.vocabulary, self.grammar.key


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class _Pause:
    length_s: float
    until: float


class Standing:
    """The grammars that worked or failed in lanes, and the pauses of tenants.

    A tenant's pause begins when one of its grammars killed a worker, and doubles if the next such failure comes within
    `MAX_PAUSE_S` of its end. Grammars that have worked are served during a pause.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # The last failure; None for a grammar that has worked.
        self._grammars: OrderedDict[tuple[str, Vocabulary, str], _Failure | None] = OrderedDict()
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def check(self, rule: Rule) -> None:
        """Refuse a grammar that failed within `REMEMBERED_S`, and a new one while its tenant's pause lasts.

        Raises:
            InvalidRequest: says why, and names the request's field.
        """
        param, now = rule.grammar.param, self._now()
        failure = self._grammars.get(rule.key)
        if failure is not None and now < failure.until:
            raise InvalidRequest(failure.reason, param)
        pause = self._pauses.get(rule.tenant)
        if pause is not None and not self.has_worked(rule) and (left_s := pause.until - now) > 0:
            raise InvalidRequest(
                f"{param}: other schemas of yours could not be matched in time: simplify the schema, or try again in "
                f"{left_s:.0f} s",
                param,
            )

    def has_worked(self, rule: Rule) -> bool:
        """Return whether a grammar was compiled or advanced in a lane and has not failed since."""
        return rule.key in self._grammars and self._grammars[rule.key] is None

    def worked(self, rule: Rule) -> None:
        """Record that a grammar was compiled or advanced in a lane, unless a sequence with it failed recently."""
        failure = self._grammars.get(rule.key)
        if failure is None or failure.until <= self._now():
            self._remember(rule, None)

    def failed(self, rule: Rule, reason: str, has_killed: bool) -> None:
        """Record that a grammar failed in a lane.

        Args:
            has_killed: its worker is lost, so that the tenant's pause begins.
        """
        self._remember(rule, _Failure(reason, self._now() + REMEMBERED_S))
        if not has_killed:
            return
        last, now = self._pauses.pop(rule.tenant, _Pause(0.0, 0.0)), self._now()
        goes_on = now < last.until + MAX_PAUSE_S
        length_s = min(max(2 * last.length_s * goes_on, MIN_PAUSE_S), MAX_PAUSE_S)
        self._pauses[rule.tenant] = _Pause(length_s, now + length_s)
        if len(self._pauses) > MAX_TENANTS:
            self._pauses.popitem(last=False)

    def _remember(self, rule: Rule, failure: _Failure | None) -> None:
        self._grammars[rule.key] = failure
        self._grammars.move_to_end(rule.key)
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
