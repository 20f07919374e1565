"""The list of shared threads in docs/security.md names each route and each message to the engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from server.api.access import ROLES
from server.protocol.messages import ClientMessage

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"


def listed(head: str) -> list[str]:
    """Return the names in the first column of the table that begins with `head`, in the section of shared threads."""
    section = PAGE.read_text().partition("\n## Shared threads\n")[2].partition("\n## ")[0]
    rows = section.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert all(all(cell.strip() for cell in row.strip("|").split("|")) for row in rows)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_each_route_says_which_threads_its_clients_hold() -> None:
    assert sorted(listed("route")) == sorted(f"{method} {path}" for method, path in ROLES)


def test_each_message_says_what_it_takes_of_the_engines_thread() -> None:
    assert sorted(listed("message")) == sorted(message.__name__ for message in get_args(ClientMessage))
