"""Measure the console in Chromium, with a registry of 10,000 variants: script, bytes and requests of each view.

Script is Chromium's own `ScriptDuration`, processor time of the page's JavaScript. Each view is opened in a profile of
its own; an interaction begins on a page that is at rest. The pages are the overview, with as many variants in memory as
`/stats` would list of a large host cache, and the list of variants; interactions are another page of the list, a search
and the change from one view to the other. Needs Debian's package chromium.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, Route, expect, sync_playwright

from bench.engine import SMALL, publish, write_base
from bench.harness import Bench, Report, at_most, fixed, ms, option, rounded, say, table_of, text
from bench.process import serve_command, serving
from bench.synthetic import write_norm_delta
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.registry import Registry

MAX_SCRIPT_S = 0.2
# Longer than any poll, so that what it brings is counted, too.
REST_MS = 1500
WAIT_MS = 60_000
NAME = "v-{:05}"
COLUMNS = {
    "what": text("what"),
    "script, ms": ms("script_s"),
    "layout and style, ms": ms("layout_s"),
    "nodes": text("nodes"),
    "heap, MB": fixed("heap_bytes", 1, 1e-6),
    "requests": text("requests"),
    "kB": fixed("bytes", 0, 1e-3),
}


@dataclass(slots=True)
class Opened:
    """A page, and the bytes and requests of the server's replies to it."""

    page: Page
    # Chromium counts durations from the start of a session on.
    session: CDPSession
    num_requests: int = 0
    num_bytes: int = 0

    def counters(self) -> dict[str, float]:
        found = self.session.send("Performance.getMetrics")["metrics"]
        return {each["name"]: each["value"] for each in found}


def fill(registry: Path, number: int) -> None:
    """Make variants of one by copies of its records, as publishing each would take minutes."""
    first = registry / "variants" / "default" / NAME.format(0) / "1.json"
    (report,) = (registry / "reports" / "default").glob(f"{NAME.format(0)}~*")
    document = first.read_text()
    for index in range(1, number):
        name = NAME.format(index)
        directory = first.parent.parent / name
        directory.mkdir()
        (directory / "1.json").write_text(document.replace(NAME.format(0), name))
        (report.parent / report.name.replace(NAME.format(0), name)).hardlink_to(report)


@contextmanager
def opened(browser: Browser, url: str, number: int) -> Iterator[Opened]:
    """Open an empty page of a new profile, whose `/stats` has so many variants in memory."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    own = Opened(page, context.new_cdp_session(page))
    # Processor time of the page's thread, and not the time that passes.
    own.session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def finished(request: Any) -> None:
        own.num_requests += 1
        own.num_bytes += request.sizes()["responseBodySize"]

    def answer(route: Route) -> None:
        stats = route.fetch().json()
        common = {
            "tenant": "default",
            "version": 1,
            "digest": "0" * 64,
            "device_bytes": 1000,
            "level": "host",
        }
        more = {"pinned": False, "num_requests": 0, "finished": 1, "tokens": int(50 * stats["at"])}
        stats["variants"] = [{"name": NAME.format(index), **common, **more} for index in range(number)]
        route.fulfill(json=stats)

    page.on("requestfinished", finished)
    page.route("**/stats", answer)
    try:
        yield own
    finally:
        context.close()


def measured(own: Opened, what: str, act: Callable[[], object]) -> dict[str, Any]:
    """Do something to a page and wait until it rests; return what that took."""
    before, requests, num_bytes = own.counters(), own.num_requests, own.num_bytes
    act()
    own.page.wait_for_timeout(REST_MS)
    after = own.counters()
    return {
        "what": what,
        "script_s": after["ScriptDuration"] - before["ScriptDuration"],
        "layout_s": sum(after[name] - before[name] for name in ("LayoutDuration", "RecalcStyleDuration")),
        "nodes": int(after["Nodes"]),
        "heap_bytes": int(after["JSHeapUsedSize"]),
        "requests": own.num_requests - requests,
        "bytes": own.num_bytes - num_bytes,
    }


def turn(browser: Browser, url: str, number: int) -> Iterator[dict[str, Any]]:
    """Open both views and use them once; yield a row for each."""
    with opened(browser, url, number) as own:
        page = own.page

        def overview() -> None:
            page.goto(url)
            expect(page.get_by_role("table", name="Versions in memory")).to_be_visible()

        def variants() -> None:
            page.get_by_role("link", name="Variants").first.click()
            expect(page.get_by_role("link", name=NAME.format(0))).to_be_visible()

        yield measured(own, "overview, first paint", overview)
        yield measured(own, "overview, a second and a half of polls", lambda: None)
        yield measured(own, "from the overview to the variants", variants)
    with opened(browser, url, number) as own:
        page = own.page

        def first() -> None:
            page.goto(f"{url}/#/variants")
            expect(page.get_by_role("link", name=NAME.format(0))).to_be_visible()

        def following() -> None:
            page.get_by_role("button", name="Next").click()
            expect(page.get_by_role("link", name=NAME.format(50))).to_be_visible()

        def search() -> None:
            page.get_by_label("Search by name").fill("v-000")
            expect(page.get_by_text("100 variants")).to_be_visible()

        yield measured(own, "variants, first paint", first)
        yield measured(own, "another page of variants", following)
        yield measured(own, "a search", search)


def medians(turns: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the median of each figure of each row."""
    return [
        {
            name: value if name == "what" else rounded({name: median(each[name] for each in rows)})[name]
            for name, value in rows[0].items()
        }
        for rows in zip(*turns, strict=True)
    ]


def report(args: Namespace) -> Report:
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("chromium is not installed: run `make packages` as root")
    number = 200 if args.small else args.variants
    base = write_base(args.directory / "base", SMALL)
    registry = Registry(args.directory / "registry")
    artifact = args.directory / "delta.safetensors"
    write_norm_delta(artifact, SMALL, 1, {}, Base.of(Checkpoint.open(base)))
    publish(registry, artifact, NAME.format(0))
    fill(registry.root, number)
    with (
        serving(serve_command(base, registry.root)) as server,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, chromium_sandbox=False) as browser,
    ):
        turns = []
        for index in range(args.repeats):
            turns.append(list(turn(browser, server.url, number)))
            say(f"turn {index + 1} of {args.repeats} is done")
        version = browser.version
    rows = medians(turns)
    return Report(
        {
            "variants": number,
            "repeats": args.repeats,
            "rest_ms": REST_MS,
            "chromium": version,
            "statistic": "median",
        },
        rows,
        [table_of(COLUMNS, rows)],
        [at_most(f"script of {row['what']}, s", row["script_s"], MAX_SCRIPT_S) for row in rows],
        conditions=f"Chromium {version}, {number:,} variants, median of {args.repeats}",
        libraries=["playwright"],
    )


main = Bench(
    "console",
    __doc__,
    report,
    [option("--variants", 10_000), option("--repeats", 5)],
    small="two hundred variants",
    folder="for the registry: a disk",
)

if __name__ == "__main__":
    sys.exit(main())
