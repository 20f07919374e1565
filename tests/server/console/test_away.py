"""The console with keys, with very many variants, and with a server that goes away and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from bench.process import free_port
from deltastore.registry import Registry
from server.tenants.changes import AuditLog, Auditor
from server.tenants.keys import KeyStore
from server.tenants.tenant import Role
from tests.deltastore.helpers.crash_storage import artifact, push
from tests.server.console.helpers.browser import WAIT_MS, counters, opened, serious_faults
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually, live_server

NUM_VARIANTS = 10_000
# Of the whole document. A row of a table takes 25.
MAX_NODES = 6000


@pytest.fixture(scope="module")
def keyed(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Run a server with keys and an admin port of its own, which `url` names."""
    registry, port = tmp_path_factory.mktemp("keyed") / "registry", free_port()
    options = ("--auth", "keys", "--admin-port", port, "--max-gpu-deltas", 2)
    with live_server(artifacts.base, registry, *options) as server:
        server.url = f"http://127.0.0.1:{port}"
        yield server


def key(server: LiveServer, tenant: str, role: Role) -> str:
    return KeyStore(server.registry).create(Auditor(AuditLog(server.registry)), tenant, [role], None).text


def expire(server: LiveServer, text: str) -> None:
    """Let a key expire now: how long a page takes to use one is not known."""
    record = server.registry / "tenants" / "keys" / f"{text.split('_')[1]}.json"
    past = datetime.now(UTC) - timedelta(seconds=1)
    record.write_text(json.dumps({**json.loads(record.read_text()), "expires_at": past.isoformat()}))


def sign_in(page: Page, text: str, *, kept: bool = False) -> None:
    page.get_by_label("API key").fill(text)
    page.get_by_label("Keep it").set_checked(kept)
    page.get_by_role("button", name="Open").click()


def test_a_key_is_asked_for_and_is_in_no_cookie_and_no_address(browser: Browser, keyed: LiveServer) -> None:
    admin = key(keyed, "ops", "admin")
    with opened(browser, keyed.url, lost=True) as page:
        addresses: list[str] = []
        page.on("request", lambda request: addresses.append(request.url))
        assert serious_faults(page) == []
        sign_in(page, "wrong-key")
        expect(page.get_by_text("API key", exact=False).first).to_be_visible()
        expect(page.get_by_role("button", name="Open")).to_be_visible()
        sign_in(page, admin)
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        assert page.context.cookies() == []
        assert not any(admin in address for address in [*addresses, page.url])
        assert page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])") == "[{},{}]"
        # In memory alone: a reload asks again.
        page.reload()
        sign_in(page, admin, kept=True)
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_a_key_that_expires_asks_for_another_one(browser: Browser, keyed: LiveServer) -> None:
    first = key(keyed, "ops", "admin")
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, first)
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        expire(keyed, first)
        expect(page.get_by_label("API key")).to_be_visible()
        sign_in(page, key(keyed, "ops", "admin"))
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()


def test_a_key_without_the_role_admin_sees_its_own_variants_and_is_told_of_the_rest(
    browser: Browser, keyed: LiveServer
) -> None:
    push(Registry(keyed.registry), artifact(1), "mine", tenant="acme")
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, "acme", "inference"))
        expect(page.get_by_text("This key does not see the server's figures")).to_be_visible()
        expect(page.get_by_role("link", name="Tenants")).to_have_count(0)
        page.get_by_role("link", name="Variants").first.click()
        page.get_by_role("link", name="mine").click()
        expect(page.get_by_text("v1 active")).to_be_visible()
        for name in ("Upload version…", "Delete…"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)


# Records the page's notices: each is removed after six seconds, which may be before a test reads it.
NOTICED = """
() => {
  window.noticed = "";
  const notices = document.querySelector(".notices");
  new MutationObserver(() => (noticed += notices.textContent)).observe(notices, {childList: true});
}
"""
# Delays effects by a second, as a busy machine does: preact runs them after a frame or a timer of 35 ms.
LATE = """
const soon = setTimeout;
window.setTimeout = (call, pause, ...rest) => soon(call, pause === 35 ? 1000 : pause, ...rest);
window.requestAnimationFrame = (call) => soon(call, 1000);
"""


def test_a_page_that_is_told_of_a_refusal_before_it_listens_shows_it(
    browser: Browser, keyed: LiveServer
) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        page.add_init_script(LATE)
        page.reload()
        sign_in(page, key(keyed, "acme", "inference"))
        expect(page.get_by_text("This key does not see the server's figures")).to_be_visible()


def test_nothing_of_one_key_is_shown_to_the_next(browser: Browser, keyed: LiveServer) -> None:
    push(Registry(keyed.registry), artifact(1), "own", tenant="initech")
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, "ops", "admin"))
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        page.get_by_role("link", name="Playground").click()
        page.get_by_label("Prompt").fill("a secret")
        page.get_by_label("Right variant").fill("secret")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        # The figures of an administrator, had they been kept, would stand until the first refusal.
        page.route("**/stats", lambda route: None)
        sign_in(page, key(keyed, "initech", "admin"))
        expect(page.get_by_label("Prompt")).to_have_value("")
        expect(page.get_by_label("Right variant")).not_to_have_value("secret")
        page.get_by_role("link", name="Variants").first.click()
        page.get_by_role("link", name="own").click()
        page.get_by_role("button", name="Pin…").click()
        expect(page.get_by_role("dialog")).to_contain_text("only shown to administrators")


def test_a_late_refusal_of_a_key_that_was_replaced_does_not_end_the_new_one(
    browser: Browser, keyed: LiveServer
) -> None:
    push(Registry(keyed.registry), artifact(1), "late", tenant="ops")
    first = key(keyed, "ops", "admin")
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, first)
        page.goto(f"{keyed.url}/#/variants/late")
        held: list[Route] = []
        page.route("**/variants/late/load?*", lambda route: held.append(route))
        page.get_by_role("button", name="Load", exact=True).click()
        while not held:
            page.wait_for_timeout(10)
        page.get_by_role("button", name="Sign out").click()
        sign_in(page, key(keyed, "ops", "admin"))
        expect(page.get_by_role("button", name="Load", exact=True)).to_be_visible()
        expire(keyed, first)
        assert eventually(lambda: client_status(keyed, first) == 401)
        page.evaluate(NOTICED)
        held[0].continue_()
        assert eventually(lambda: "API key" in page.evaluate("noticed"))
        page.get_by_role("link", name="Overview").click()
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()


def client_status(server: LiveServer, text: str) -> int:
    return server.client.get(f"{server.url}/me", headers={"Authorization": f"Bearer {text}"}).status_code


def test_an_administrator_acts_for_another_tenant(browser: Browser, keyed: LiveServer) -> None:
    registry = Registry(keyed.registry)
    for seed in (1, 2):
        push(registry, artifact(seed), "theirs", tenant="globex")
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, "ops", "admin"))
        page.get_by_label("Tenant").select_option("globex")
        page.get_by_role("link", name="Variants").first.click()
        page.get_by_role("link", name="theirs").click()
        page.get_by_role("button", name="Roll back to v1…").click()
        page.get_by_role("dialog").get_by_role("button", name="Roll back to v1").click()
        expect(page.get_by_text("v1 active")).to_be_visible()
        expect(page.get_by_role("region", name="History").get_by_role("listitem").first).to_contain_text(
            "key "
        )
    assert registry.summary("globex", "theirs").active == 1


def test_ten_thousand_variants_are_paged_and_searched(browser: Browser, keyed: LiveServer, many: str) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, many, "publish"))
        page.get_by_role("link", name="Variants").first.click()
        expect(page.get_by_text("1–50 of 10,000")).to_be_visible()
        expect(page.get_by_role("table", name="Variants").get_by_role("row")).to_have_count(51)
        page.get_by_role("button", name="Next").click()
        expect(page.get_by_text("51–100 of 10,000")).to_be_visible()
        expect(page.get_by_role("link", name="v-00050")).to_be_visible()
        page.get_by_role("button", name="Previous").click()
        expect(page.get_by_role("link", name="v-00000")).to_be_visible()
        page.get_by_label("Search by name").fill("V-0999")
        expect(page.get_by_text("10 variants")).to_be_visible()
        expect(page.get_by_role("link", name="v-09999")).to_be_visible()
        page.get_by_label("Search by name").fill("nothing")
        expect(page.get_by_text("No name has this part")).to_be_visible()
        page.get_by_label("Search by name").fill("")
        expect(page.get_by_text("1–50 of 10,000")).to_be_visible()
        assert counters(page)["Nodes"] < MAX_NODES
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_role("button", name="Next").click()
        expect(page.get_by_text("51–100 of 10,000")).to_be_visible()
        # Nothing but the new page of the list, and the old one if its poll came just before.
        pages = {f"{keyed.url}/variants?limit=50{after}" for after in ("", "&after=v-00049")}
        assert {url for url in asked if "/variants" in url} <= pages
        assert serious_faults(page) == []


def test_a_page_is_turned_once_and_its_label_is_that_of_the_rows(
    browser: Browser, keyed: LiveServer, many: str
) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, many, "publish"))
        page.get_by_role("link", name="Variants").first.click()
        expect(page.get_by_text("1–50 of 10,000")).to_be_visible()
        held: list[Route] = []
        page.route("**/variants?limit=50&after=v-00049", lambda route: held.append(route))
        following = page.get_by_role("button", name="Next")
        following.click()
        expect(page.get_by_text("… of 10,000")).to_be_visible()
        following.click()
        following.click()
        while not held:
            page.wait_for_timeout(10)
        (route,) = held
        route.continue_()
        expect(page.get_by_text("51–100 of 10,000")).to_be_visible()
        expect(page.get_by_role("link", name="v-00050")).to_be_visible()
        following.click()
        expect(page.get_by_text("101–150 of 10,000")).to_be_visible()
        expect(page.get_by_role("link", name="v-00100")).to_be_visible()


def test_a_page_that_is_turned_at_once_stays_turned(browser: Browser, keyed: LiveServer, many: str) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, many, "publish"))
        expect(page.get_by_role("link", name="Variants").first).to_be_visible()
        page.clock.install()
        page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))
        page.get_by_role("link", name="Variants").first.click()
        expect(page.get_by_role("heading", name="Variants", exact=True)).to_be_visible()
        with page.expect_response("**/variants?*"):
            page.clock.run_for(100)
        with page.expect_response("**/variants?limit=50&after=*"):
            page.get_by_role("button", name="Next").click()
            page.clock.run_for(50)
        expect(page.get_by_text("51–100 of 10,000")).to_be_visible()
        # The delay of the search has ended.
        page.clock.run_for(1000)
        expect(page.get_by_text("51–100 of 10,000")).to_be_visible()


def test_ten_thousand_loaded_variants_make_a_page_of_a_hundred_rows(
    browser: Browser, keyed: LiveServer
) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        page.route("**/stats", with_variants)
        sign_in(page, key(keyed, "ops", "admin"))
        loaded = page.get_by_role("table", name="Versions in memory")
        # The header, the rows, and the line about the others.
        expect(loaded.get_by_role("row")).to_have_count(102)
        expect(loaded).to_contain_text("v-09999")
        expect(loaded).to_contain_text("and 9,900 more")
        expect(page.get_by_text("10,000 in memory, used last first")).to_be_visible()
        # Rates of the shown ones follow.
        expect(loaded.get_by_role("row", name="v-09999")).to_contain_text("500")
        assert counters(page)["Nodes"] < MAX_NODES
        assert serious_faults(page) == []


# Rows of `/stats`: they are made once, since a page asks each second.
LOADED = ",".join(
    json.dumps(
        {"name": f"v-{number:05}", "tenant": "many", "version": 1, "digest": "0" * 64, "device_bytes": 1000}
        | {"level": "host", "pinned": False, "num_requests": 0, "finished": 1, "tokens": -1}
    )
    for number in range(NUM_VARIANTS)
)


def with_variants(route: Route) -> None:
    """Answer `/stats` with very many variants in memory, each of which makes 500 tokens a second."""
    reply = route.fetch(timeout=WAIT_MS)
    stats = {**reply.json(), "variants": []}
    rows = LOADED.replace('"tokens": -1', f'"tokens": {int(500 * stats["at"])}')
    route.fulfill(response=reply, body=json.dumps(stats).replace('"variants": []', f'"variants": [{rows}]'))


# Answers the polls of a page at once, with figures that go on.
PLAYED = """
() => {
  const asked = fetch, documents = {};
  const began = Date.now();
  window.num_polls = 0;
  window.fetch = async (url, options) => {
    const path = new URL(url).pathname;
    documents[path] ??= await (await asked(url, options)).json();
    const document = structuredClone(documents[path]);
    if (path.endsWith("/stats")) {
      window.num_polls += 1;
      document.at += (Date.now() - began) / 1000;
      document.requests.generation_tokens += 40 * window.num_polls;
      document.engine.steps += 10 * window.num_polls;
      document.engine.step_requests += 25 * window.num_polls;
    }
    return new Response(JSON.stringify(document), {headers: {"Content-Type": "application/json"}});
  };
}
"""


def test_an_hour_of_polls_leaves_memory_and_page_as_they_were_after_the_kept_minutes(
    browser: Browser, keyed: LiveServer
) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        page.clock.install()
        page.goto(keyed.url)
        sign_in(page, key(keyed, "ops", "admin"))
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        page.evaluate(PLAYED)
        # The first comes from the server, at its own pace.
        assert eventually(lambda: page.evaluate("num_polls"))
        at = []
        for _ in range(3):
            for _ in range(20 * 60):
                page.clock.run_for(1000)
            at.append(counters(page))
        # A poll a second, and fewer only by a few that two seconds shared.
        assert page.evaluate("num_polls") > 3500
        assert at[2]["Nodes"] < at[0]["Nodes"] + 200
        assert at[2]["JSEventListeners"] < at[0]["JSEventListeners"] + 20
        assert at[2]["JSHeapUsedSize"] < at[0]["JSHeapUsedSize"] + 100_000


@pytest.fixture(scope="module")
def many(keyed: LiveServer) -> str:
    """Make a tenant with variants by links to the files of one, as publishing each would take minutes."""
    registry, tenant = keyed.registry, "many"
    push(Registry(registry), artifact(7), "v-00000", tenant=tenant)
    first = registry / "variants" / tenant / "v-00000" / "1.json"
    (report,) = (registry / "reports" / tenant).glob("v-00000~*")
    text = first.read_text()
    for number in range(1, NUM_VARIANTS):
        name = f"v-{number:05}"
        directory = first.parent.parent / name
        directory.mkdir()
        (directory / "1.json").write_text(text.replace("v-00000", name))
        (report.parent / report.name.replace("v-00000", name)).hardlink_to(report)
    return tenant


def test_a_server_that_goes_away_and_comes_back_is_said_and_seen(
    browser: Browser, artifacts: Artifacts, tmp_path: Path
) -> None:
    port = free_port()
    registry = tmp_path / "registry"
    with live_server(artifacts.base, registry, "--port", port) as server:
        assert server.upload("staying", artifacts.plain).status_code == 201
        with opened(browser, server.url, lost=True) as page:
            expect(page.locator(".state.ready")).to_be_visible()
            expect(page.get_by_role("region", name="Last changes")).to_contain_text("staying")
            server.stop()
            expect(page.get_by_text("The server has not answered since")).to_be_visible()
            expect(page.locator(".state.away")).to_be_visible()
            assert serious_faults(page) == []
            # What was known stays.
            expect(page.get_by_role("region", name="Last changes")).to_contain_text("staying")
            page.get_by_role("link", name="Variants").first.click()
            expect(page.get_by_text("the server does not answer")).to_be_visible()
            page.evaluate(NOTICED)
            with live_server(artifacts.base, registry, "--port", port):
                assert eventually(lambda: "The server answers again" in page.evaluate("noticed"))
                expect(page.get_by_text("The server has not answered since")).to_have_count(0)
                expect(page.get_by_role("link", name="staying")).to_be_visible()
                page.get_by_role("link", name="Overview").click()
                expect(page.locator(".state.ready")).to_be_visible()


# Notes when the page asks for the live state.
ASKED = """
() => {
  const asked = fetch;
  window.askedAt = [];
  window.fetch = (url, options) => {
    if (new URL(url).pathname.endsWith("/stats")) askedAt.push(performance.now());
    return asked(url, options);
  };
}
"""
HIDE = """
() => {
  Object.defineProperty(document, "hidden", {value: true, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}
"""
SHOW = "() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }"


def test_a_hidden_page_asks_for_nothing_and_one_that_is_seen_asks_once_a_second(
    browser: Browser, keyed: LiveServer
) -> None:
    with opened(browser, keyed.url, lost=True) as page:
        sign_in(page, key(keyed, "ops", "admin"))
        expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
        page.evaluate(ASKED)
        assert eventually(lambda: page.evaluate("askedAt.length") >= 5)
        asked = page.evaluate("askedAt")
        # Milliseconds: never more often than once a second.
        assert (asked[-1] - asked[0]) / (len(asked) - 1) > 950
        page.evaluate(HIDE)
        number = page.evaluate("askedAt.length")
        page.wait_for_timeout(3000)
        assert page.evaluate("askedAt.length") == number
        page.evaluate(SHOW)
        assert eventually(lambda: page.evaluate("askedAt.length") > number)
