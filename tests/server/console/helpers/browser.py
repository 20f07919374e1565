"""Debian's Chromium, which tests and `make screenshots` open the console with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

SIZE: ViewportSize = {"width": 1440, "height": 900}
WAIT_MS = 20_000


@contextmanager
def running_browser(program: str) -> Iterator[Browser]:
    """Run a program that is Chromium, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=False)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, scheme: Literal["light", "dark"] = "light", lost: bool = False
) -> Iterator[Page]:
    """Open the console in a profile of its own; fail for an exception or a complaint of the page.

    Args:
        browser: runs already.
        url: of the server.
        scheme: of colours.
        lost: the server goes away meanwhile or refuses calls, which the browser's own log tells of.
    """
    context = browser.new_context(viewport=SIZE, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    complaints: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (lost and "Failed to load" in message.text):
            complaints.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not complaints, complaints
