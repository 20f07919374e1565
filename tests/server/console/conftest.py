"""One Chromium for all tests of the console."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.server.console.helpers.browser import running_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Run Chromium; tests that take it are marked with `NEEDS_CHROMIUM`."""
    with running_browser() as running:
        yield running
