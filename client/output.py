"""Results on stdout as JSON documents."""

from __future__ import annotations

import json
from typing import Any


def print_json(document: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2))


def print_reply(content: bytes) -> None:
    """Print the JSON body of an answer. It has been parsed before, so it is valid."""
    print_json(json.loads(content))
