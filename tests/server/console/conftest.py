"""One Chromium for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.debian import debian_tool
from tests.server.console.helpers.browser import running_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# Not for several files: while Playwright runs, other tests of the process cannot run event loops of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium; without its package, tests that take it skip, and fail in CI."""
    with running_browser(debian_tool("chromium")) as running:
        yield running
