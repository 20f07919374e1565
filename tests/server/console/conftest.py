"""One Chromium for all tests of the console."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.debian import debian_tool
from tests.server.console.helpers.browser import running_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Run Chromium; without its package, tests that take it skip, and fail in CI."""
    with running_browser(debian_tool("chromium")) as running:
        yield running
