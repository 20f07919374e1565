"""The lists of calls, commands, settings, errors and metrics in the documentation are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from docs.reference import FILE, reference
from peraxis.cli import COMMANDS
from server.api.access import ROLES
from server.api.errors import FAILURES, HTTP_FAILURES

ROOT = Path(__file__).resolve().parent.parent


def test_the_reference_is_what_the_code_says() -> None:
    assert FILE.read_text() == reference(), "run `make reference`"


def test_the_readme_names_every_command_and_call() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"[a-z][a-z-]+", text))
    assert not [name for name in COMMANDS if name not in named]
    paths = {path.replace("{name}", "NAME").replace("{model_id}", "NAME") for _, path in ROLES}
    assert not [path for path in paths if path not in text and f"/{path.split('/')[-1]}`" not in text]


def test_the_description_of_errors_has_every_status_and_code() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    kinds = {*FAILURES.values(), *HTTP_FAILURES.values()}
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for failure in kinds:
        assert any(row.startswith(f"| {failure.status} |") and f"`{failure.code}`" in row for row in rows), (
            failure
        )
