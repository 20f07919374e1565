"""Debian's Chromium, which tests and `make screenshots` open the console with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

from tests.helpers.debian import missing_package

Scheme = Literal["light", "dark"]
SIZE: ViewportSize = {"width": 1440, "height": 900}
WAIT_MS = 240_000


@contextmanager
def running_browser(program: str) -> Iterator[Browser]:
    """Run a program that is Chromium, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=False, timeout=WAIT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, scheme: Scheme = "light", lost: bool = False) -> Iterator[Page]:
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
        # A route's handler may be in a call that the end of the context fails.
        page.unroute_all(behavior="ignoreErrors")
        context.close()
    assert not complaints, complaints


def serious_faults(page: Page) -> list[str]:
    """Return what axe-core finds of serious and critical impact in a page; without its package, skip, in CI fail."""
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        missing_package("axe-playwright-python")
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['target']} {node['html']}: {node['failureSummary']}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def counters(page: Page) -> dict[str, float]:
    """Return Chromium's own figures of a page, after a collection of garbage, such as `Nodes` and `JSHeapUsedSize`."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    session.send("HeapProfiler.collectGarbage")
    found = session.send("Performance.getMetrics")["metrics"]
    session.detach()
    return {each["name"]: each["value"] for each in found}
