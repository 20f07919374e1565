"""Write the pictures of `docs/console.md`, as `make screenshots` does.

A server with tiny variants answers requests meanwhile, so that each view shows figures. None is of the
playground, because tiny models answer with noise.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page

from tests.helpers.debian import debian_tool
from tests.server.console.helpers.browser import opened, running_browser
from tests.server.helpers.live_server import ROOT, Artifacts, LiveServer, live_server, make_artifacts

DIRECTORY = ROOT / "docs" / "console"
NAMES = ("support-en", "support-de", "legal", "sql-assistant", "summaries", "code-review")
BUSY_S = 25.0
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def main(directory: Path) -> None:
    """Write the pictures into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = make_artifacts(Path(scratch) / "models")
        registry = Path(scratch) / "registry"
        with (
            live_server(artifacts.base, registry, "--max-gpu-deltas", 4) as server,
            running_browser(debian_tool("chromium")) as browser,
        ):
            _fill(server, artifacts)
            for scheme in SCHEMES:
                _shoot(browser, server, directory, scheme)


def _fill(server: LiveServer, artifacts: Artifacts) -> None:
    """Publish variants, of which one has several versions and was rolled back."""
    for name in NAMES:
        server.upload(name, artifacts.chatty)
    server.upload("support-en", artifacts.third)
    server.upload("support-en", artifacts.plain)
    server.client.patch("/variants/support-en", json={"active": 1, "if_active": 3})
    server.client.patch("/variants/legal", json={"visibility": "public"})
    server.client.post("/variants/legal/pin")


def _shoot(browser: Browser, server: LiveServer, directory: Path, scheme: Literal["light", "dark"]) -> None:
    stopping = threading.Event()
    busy = [threading.Thread(target=_ask, args=(server, name, stopping)) for name in NAMES[:5]]
    for thread in busy:
        thread.start()
    try:
        with opened(browser, server.url, scheme=scheme) as page:
            page.wait_for_timeout(1000 * BUSY_S)
            _picture(page, directory / f"overview-{scheme}.png")
            page.goto(f"{server.url}/#/variants")
            page.get_by_role("link", name="support-en").wait_for()
            page.get_by_role("link", name="support-en").click()
            page.get_by_role("button", name="Roll back to", exact=False).or_(
                page.get_by_role("button", name="Promote…")
            ).first.wait_for()
            _picture(page, directory / f"variant-{scheme}.png")
            page.get_by_role("row", name="v2").get_by_role("button", name="Promote…").click()
            page.get_by_role("dialog").wait_for()
            _picture(page, directory / f"promote-{scheme}.png")
    finally:
        stopping.set()
        for thread in busy:
            thread.join()


def _ask(server: LiveServer, name: str, stopping: threading.Event) -> None:
    """Send requests one after the other."""
    while not stopping.wait(0.3):
        server.generate(
            name, prompt="Which plan includes it?", max_new_tokens=60, temperature=1, seed=len(name)
        )


def _picture(page: Page, path: Path) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
