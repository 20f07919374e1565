"""The header `traceparent`, by the rules of https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import pytest

from server.protocol.request import RequestContext, trace_id_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "header",
    [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-more"],
)
def test_a_valid_header_is_kept_and_names_its_trace(header: str) -> None:
    assert trace_id_of(header) == TRACE
    assert RequestContext.of("r", header).traceparent == header


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 600,
        "x" * 100_000,
    ],
)
def test_an_invalid_header_is_ignored(header: str | None) -> None:
    assert trace_id_of(header) is None
    assert RequestContext.of("r", header).traceparent is None
