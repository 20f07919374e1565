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


def test_the_reference_names_every_command_and_call() -> None:
    text = FILE.read_text()
    assert not [name for name in COMMANDS if f"`peraxis {name}" not in text]
    assert not [f"{method} {path}" for method, path in ROLES if f"{path}`" not in text]


def test_every_link_between_pages_leads_to_a_page_and_a_heading() -> None:
    pages = [
        path
        for path in ROOT.rglob("*.md")
        if not {".clients", ".venv", ".venv-vllm", "node_modules"} & {*path.parts}
    ]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert len(links) > 100
    assert not [f"{page}: {link}" for page, link in links if not _leads_somewhere(page, link)]


def _leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a link leads out of the repository, or to a file and one of its headings."""
    if re.match(r"[a-z]+:", link):
        return True
    name, _, heading = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not heading or not target.is_file():
        return target.exists()
    titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_description_of_errors_has_every_status_and_code() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    kinds = {*FAILURES.values(), *HTTP_FAILURES.values()}
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for failure in kinds:
        assert any(row.startswith(f"| {failure.status} |") and f"`{failure.code}`" in row for row in rows), (
            failure
        )
