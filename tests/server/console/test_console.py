"""The console in Chromium, against a server without keys: what it shows, and every action that it offers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.server.console.helpers.browser import WAIT_MS, Scheme, opened, serious_faults
from tests.server.helpers.live_server import Artifacts, LiveServer, eventually, live_server


@pytest.fixture(scope="module")
def operated(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Run a server with three slots for the tests of this file. Each test uses names of its own."""
    registry = tmp_path_factory.mktemp("console") / "registry"
    with live_server(artifacts.base, registry, "--max-gpu-deltas", 3) as server:
        yield server


@pytest.fixture
def page(browser: Browser, operated: LiveServer) -> Iterator[Page]:
    with opened(browser, operated.url) as page:
        yield page


def publish(server: LiveServer, name: str, *artifacts: Path) -> None:
    for artifact in artifacts:
        assert server.upload(name, artifact).status_code == 201


def show(page: Page, server: LiveServer, path: str) -> None:
    page.goto(f"{server.url}/#/{path}")


def row(page: Page, version: int) -> Locator:
    return page.get_by_role("row", name=re.compile(rf"^v{version}\b"))


def active(server: LiveServer, name: str) -> int:
    number: int = server.client.get(f"/variants/{name}").json()["active"]
    return number


def version(server: LiveServer, name: str, number: int) -> dict[str, Any]:
    shown = server.client.get(f"/variants/{name}", params={"after": number - 1, "limit": 1}).json()
    document: dict[str, Any] = shown["versions"][0]
    return document


def test_one_screen_shows_what_is_loaded_what_is_slow_and_what_changed_last(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    operated.unload_all()
    publish(operated, "shown", artifacts.plain)
    assert operated.generate("shown", max_new_tokens=4).status_code == 200
    loaded = page.get_by_role("table", name="Versions in memory")
    expect(loaded.get_by_role("row", name="shown@1")).to_contain_text("in a slot")
    slow = page.get_by_role("table", name="Cold starts and loads by stage")
    expect(slow.get_by_role("row", name="Cold start from disk")).to_contain_text("s")
    expect(slow.get_by_role("row", name="From disk whole load")).to_be_visible()
    changes = page.get_by_role("region", name="Last changes")
    expect(changes.get_by_role("listitem").first).to_contain_text("shown@1 published")
    expect(page.get_by_role("table", name="Device memory by use")).to_contain_text("Base model")
    expect(page.get_by_text("1 / 3")).to_be_visible()
    # At 1440 x 900 nothing of it needs a scroll.
    heights = page.evaluate(
        "[document.querySelector('main').scrollHeight, document.querySelector('main').clientHeight]"
    )
    assert heights[0] <= heights[1]
    for name in (
        "Loaded",
        "Cold starts and loads",
        "Last changes",
        "Memory",
        "Requests",
        "Tokens per second",
    ):
        box = page.get_by_role("region", name=name, exact=True).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 900
        assert box["height"] > 200


def test_rates_follow_what_the_server_does_and_stand_in_a_table_too(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "rated", artifacts.plain)
    chart = page.get_by_role("region", name="Tokens per second")
    expect(chart.locator(".legend")).to_contain_text("generated")
    # So many that some run for as long as the page is looked at.
    with operated.streaming("rated", max_new_tokens=3000, n=128, temperature=2.0, seed=1) as stream:
        next(stream)
        expect(chart.locator(".legend span").first).to_contain_text(re.compile(r"generated\s*[1-9]"))
        expect(page.get_by_text("running").first).to_be_visible()
    chart.get_by_text("Table").click()
    expect(chart.get_by_role("table")).to_contain_text("Minute")
    expect(chart.get_by_role("table").get_by_role("row").nth(1)).to_contain_text(re.compile(r"[1-9]"))


def test_a_version_is_rolled_back_by_keyboard_alone(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "keyed", artifacts.plain, artifacts.third)

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate("(document.activeElement.textContent || '').trim()")
            if focused == name:
                return
        raise AssertionError(f"{name} cannot be reached")

    expect(page.get_by_role("link", name="Variants").first).to_be_visible()
    tab_to("Variants")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Variants", exact=True)).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("keye")
    expect(page.get_by_text("1 variant", exact=True)).to_be_visible()
    tab_to("keyed")
    page.keyboard.press("Enter")
    expect(page.get_by_text("v2 active")).to_be_visible()
    tab_to("Roll back to v1…")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("table", name="What changes")).to_be_visible()
    expect(dialog.get_by_role("button", name="Roll back to v1")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_text("v1 active")).to_be_visible()
    expect(dialog).to_have_count(0)
    assert active(operated, "keyed") == 1
    history = page.get_by_role("region", name="History").get_by_role("listitem")
    expect(history.first).to_contain_text("v1 promoted")
    expect(history).to_have_count(3)


def test_the_key_of_the_search_works_from_the_turn_that_shows_the_field(
    page: Page, operated: LiveServer
) -> None:
    expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
    assert page.evaluate(
        """() => new Promise((resolve) => {
          new MutationObserver((_, observer) => {
            const field = document.querySelector("input[type=search]");
            if (!field) return;
            observer.disconnect();
            document.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true }));
            resolve(document.activeElement === field);
          }).observe(document.body, { childList: true, subtree: true });
          location.hash = "#/variants";
        })"""
    )


def test_escape_closes_a_dialog_changes_nothing_and_gives_the_focus_back(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "kept", artifacts.plain, artifacts.third)
    show(page, operated, "variants/kept")
    button = page.get_by_role("button", name="Roll back to v1…")
    button.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(button).to_be_focused()
    assert active(operated, "kept") == 2


def test_a_dialog_stays_until_its_answer_comes(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "waited", artifacts.plain)
    held: list[Route] = []
    page.route("**/variants/waited/pin?*", lambda route: held.append(route))
    show(page, operated, "variants/waited")
    page.get_by_role("button", name="Pin…").click()
    dialog = page.get_by_role("dialog", name="Pin waited@1")
    dialog.get_by_role("button", name="Pin", exact=True).click()
    while not held:
        page.wait_for_timeout(10)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("button", name="Cancel")).to_be_disabled()
    held[0].continue_()
    expect(dialog).to_have_count(0)
    assert operated.client.post("/variants/waited/unpin").is_success


def test_a_link_that_is_used_stays_where_it_is_while_others_are_used_and_changed(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    operated.unload_all()
    for name in ("resting", "moving"):
        publish(operated, name, artifacts.plain)
        assert operated.generate(name, max_new_tokens=4).status_code == 200
    loaded = page.get_by_role("table", name="Versions in memory").get_by_role("row")
    expect(loaded.nth(2)).to_contain_text("resting")
    link = page.get_by_role("table", name="Versions in memory").get_by_role("link", name="resting")
    link.focus()
    assert operated.generate("resting", max_new_tokens=4).status_code == 200
    publish(operated, "latest", artifacts.plain)
    assert operated.generate("latest", max_new_tokens=4).status_code == 200
    expect(loaded.nth(3)).to_contain_text("latest")
    expect(loaded.nth(2)).to_contain_text("resting")
    expect(link).to_be_focused()
    changed = page.get_by_role("region", name="Last changes").get_by_role("link", name="latest")
    changed.focus()
    expect(loaded.nth(1)).to_contain_text("latest")
    publish(operated, "newer", artifacts.plain)
    expect(page.get_by_role("region", name="Last changes")).to_contain_text("newer@1 published")
    expect(changed).to_be_focused()


def test_the_second_of_two_operators_is_told(
    browser: Browser, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "raced", artifacts.plain, artifacts.third, artifacts.spare[0])
    with opened(browser, operated.url, lost=True) as page:
        show(page, operated, "variants/raced")
        row(page, 1).get_by_role("button", name="Roll back…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("v3, now")
        assert operated.client.patch("/variants/raced", json={"active": 2}).status_code == 200
        # The page behind the dialog knows, and the dialog asks for what it shows.
        expect(page.get_by_text("v2 active")).to_be_attached()
        expect(dialog).to_contain_text("v3, now")
        dialog.get_by_role("button", name="Roll back to v1").click()
        expect(dialog.get_by_role("alert")).to_contain_text("version 2 is active now, and not 3")
    assert active(operated, "raced") == 2


def test_versions_are_loaded_pinned_with_a_forecast_and_unloaded(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    operated.unload_all()
    publish(operated, "held", artifacts.plain, artifacts.third)
    publish(operated, "older", artifacts.chatty)
    publish(operated, "filler", artifacts.plain)
    show(page, operated, "variants/held")
    row(page, 1).get_by_role("button", name="Load", exact=True).click()
    expect(row(page, 1)).to_contain_text("in a slot")
    row(page, 2).get_by_role("button", name="Pin…").click()
    expect(page.get_by_role("dialog")).to_contain_text("2 of 3 slots are free: nothing is evicted.")
    page.get_by_role("dialog").get_by_role("button", name="Pin", exact=True).click()
    expect(row(page, 2)).to_contain_text("pinned")
    assert version(operated, "held", 2)["pinned"] is True
    show(page, operated, "variants/filler")
    row(page, 1).get_by_role("button", name="Load", exact=True).click()
    expect(row(page, 1)).to_contain_text("in a slot")
    show(page, operated, "variants/older")
    row(page, 1).get_by_role("button", name="Pin…").click()
    # The pinned one stays, so of the others the one would go that was used first.
    expect(page.get_by_role("dialog")).to_contain_text("it would evict default/held@1")
    page.get_by_role("dialog").get_by_role("button", name="Pin", exact=True).click()
    expect(row(page, 1)).to_contain_text("pinned")
    assert eventually(lambda: version(operated, "held", 1)["level"] != "device")
    row(page, 1).get_by_role("button", name="Unpin").click()
    expect(row(page, 1).get_by_role("button", name="Pin…")).to_be_visible()
    row(page, 1).get_by_role("button", name="Unload").click()
    expect(row(page, 1)).to_contain_text("on disk")
    operated.unload_all()


def test_a_variant_is_deleted_only_with_its_name_typed(
    browser: Browser, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "doomed", artifacts.plain, artifacts.third)
    # It may ask for the variant just before it is told that it is deleted.
    with opened(browser, operated.url, lost=True) as page:
        show(page, operated, "variants/doomed")
        page.get_by_role("button", name="Details of version 1").click()
        expect(page.get_by_role("dialog")).to_contain_text("sha256:")
        page.get_by_role("dialog").get_by_role("button", name="Delete version…").click()
        dialog = page.get_by_role("dialog", name="Delete doomed@1")
        dialog.get_by_label("to confirm").fill("doomed@1")
        dialog.get_by_role("button", name="Delete").click()
        expect(row(page, 1)).to_have_count(0)
        page.get_by_role("button", name="Delete…", exact=True).click()
        dialog = page.get_by_role("dialog", name="Delete doomed")
        button = dialog.get_by_role("button", name="Delete")
        expect(button).to_be_disabled()
        dialog.get_by_label("to confirm").fill("doome")
        expect(button).to_be_disabled()
        page.keyboard.press("Enter")
        assert active(operated, "doomed") == 2
        dialog.get_by_label("to confirm").fill("doomed")
        button.click()
        expect(page.get_by_role("heading", name="Variants", exact=True)).to_be_visible()
    assert operated.client.get("/variants/doomed").status_code == 404


def test_a_variant_that_is_deleted_while_its_page_is_open_says_so(
    browser: Browser, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "vanishing", artifacts.plain)
    with opened(browser, operated.url, lost=True) as page:
        show(page, operated, "variants/vanishing")
        expect(page.get_by_text("v1 active")).to_be_visible()
        assert operated.client.delete("/variants/vanishing").status_code == 200
        expect(page.get_by_text("This variant was deleted")).to_be_visible()
        show(page, operated, "variants/never-was")
        expect(page.get_by_text("There is no such variant")).to_be_visible()


def test_an_artifact_is_uploaded_and_a_refusal_shows_the_servers_reason(
    browser: Browser, operated: LiveServer, artifacts: Artifacts, tmp_path: Path
) -> None:
    with opened(browser, operated.url, lost=True) as page:
        show(page, operated, "variants")
        page.get_by_role("button", name="Upload…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name").fill("sent")
        wrong = tmp_path / "wrong.safetensors"
        wrong.write_bytes(b"this is no artifact")
        dialog.get_by_label("Artifact").set_input_files(wrong)
        dialog.get_by_role("button", name="Upload").click()
        expect(dialog.get_by_role("alert")).not_to_be_empty()
        dialog.get_by_label("Artifact").set_input_files(artifacts.plain)
        dialog.get_by_role("button", name="Upload").click()
        page.get_by_role("link", name="sent").click()
        page.get_by_role("button", name="Upload version…").click()
        dialog.get_by_label("Artifact").set_input_files(artifacts.third)
        dialog.get_by_label("Make it the active version").uncheck()
        dialog.get_by_role("button", name="Upload").click()
        expect(row(page, 2)).to_be_visible()
    document = operated.client.get("/variants/sent").json()
    assert (document["active"], document["num_versions"]) == (1, 2)


def test_a_slow_upload_shows_its_rate_and_time_left_and_can_be_cancelled(
    browser: Browser, operated: LiveServer, tmp_path: Path
) -> None:
    large = tmp_path / "large.safetensors"
    with large.open("wb") as file:
        file.write((4088).to_bytes(8, "little") + b"{")
        file.truncate(48_000_000)
    with opened(browser, operated.url, lost=True) as page:
        limits = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 100_000}
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", limits)
        show(page, operated, "variants")
        page.get_by_role("button", name="Upload…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name").fill("slow")
        dialog.get_by_label("Artifact").set_input_files(large)
        dialog.get_by_role("button", name="Upload").click()
        expect(dialog.get_by_role("status")).to_contain_text(re.compile(r"of 48 MB · .*/s · .* left"))
        # Neither Escape, once and once more, nor a chooser of files without a choice ends what runs.
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        dialog.get_by_label("Artifact").dispatch_event("cancel", {"bubbles": True})
        expect(dialog.get_by_role("status")).to_contain_text("of 48 MB")
        dialog.get_by_role("button", name="Cancel upload").click()
        expect(dialog.get_by_role("button", name="Upload", exact=True)).to_be_enabled()
        dialog.get_by_label("Artifact").dispatch_event("cancel", {"bubbles": True})
        expect(dialog.get_by_role("button", name="Upload", exact=True)).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
    assert operated.client.get("/variants/slow").status_code == 404


def test_two_versions_answer_side_by_side_and_their_parting_is_marked(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    operated.unload_all()
    publish(operated, "tried", artifacts.plain, artifacts.third)
    operated.client.post("/variants/tried/load", params={"version": 2})
    assert eventually(lambda: version(operated, "tried", 2)["level"] == "device")
    show(page, operated, "variants/tried")
    page.get_by_role("button", name="Try it").click()
    sides = [page.get_by_role("region", name=f"{side} answer") for side in ("Left", "Right")]
    page.get_by_label("Left variant").fill("tried")
    page.get_by_label("Right variant").fill("tried@1")
    page.get_by_label("Prompt").fill("hello")
    page.get_by_label("Form").select_option("completion")
    page.get_by_label("Tokens").fill("24")
    page.get_by_role("button", name="Run both").click()
    for side in sides:
        expect(side).to_contain_text("ended by")
        expect(side).to_contain_text(re.compile(r"First token\s*[\d.]+ m?s"))
    expect(sides[0]).to_contain_text("warm")
    expect(sides[1]).to_contain_text("cold, from disk")
    expect(sides[0]).to_contain_text("v2")
    expect(sides[1]).to_contain_text("v1")

    def text_of(number: int) -> str:
        body = {"model": f"tried@{number}", "prompt": "hello", "max_tokens": 24, "temperature": 0, "seed": 0}
        answer: str = operated.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return answer

    one, other = text_of(2), text_of(1)
    common = next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert sides[0].locator(".answer").evaluate("node => node.textContent") == one
    assert sides[0].locator("mark").evaluate("node => node.textContent") == one[common:]
    assert sides[1].locator("mark").evaluate("node => node.textContent") == other[common:]
    page.get_by_label("Right variant").fill("tried@2")
    page.get_by_role("button", name="Run both").click()
    expect(page.get_by_text("Both texts are equal")).to_be_visible()
    expect(page.locator("mark")).to_have_count(0)


def test_a_chat_without_a_template_shows_the_servers_reason_on_its_side(
    browser: Browser, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "templateless", artifacts.plain)
    publish(operated, "talking", artifacts.chatty)
    with opened(browser, operated.url, lost=True) as page:
        show(page, operated, "playground")
        page.get_by_label("Left variant").fill("absent")
        page.get_by_label("Right variant").fill("talking")
        page.get_by_label("Prompt").fill("hello")
        page.keyboard.press("Control+Enter")
        left = page.get_by_role("region", name="Left answer")
        expect(left.get_by_role("alert")).to_contain_text("absent")
        expect(page.get_by_role("region", name="Right answer")).to_contain_text("ended by")


def test_a_name_is_offered_in_an_empty_field_and_never_in_one_that_somebody_is_in(
    page: Page, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "offered", artifacts.plain)
    expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
    held: list[Route] = []
    page.route("**/v1/models?*", lambda route: held.append(route))
    left = page.get_by_label("Left variant")
    named = page.locator('datalist option[value="offered"]')

    def answer_names() -> None:
        while not held:
            page.wait_for_timeout(10)
        held.pop().continue_()
        expect(named).to_have_count(1)

    show(page, operated, "playground")
    left.focus()
    answer_names()
    expect(left).to_have_value("")
    show(page, operated, "overview")
    expect(page.get_by_role("heading", name="Loaded")).to_be_visible()
    show(page, operated, "playground")
    answer_names()
    expect(left).not_to_have_value("")


def test_names_and_reports_with_markup_are_shown_as_text(
    browser: Browser, operated: LiveServer, artifacts: Artifacts
) -> None:
    publish(operated, "marked", artifacts.plain)
    hostile = "<img src=x onerror=window.hit=1>\u202e"

    with opened(browser, operated.url) as page:

        def rename(route: Any) -> None:
            reply = route.fetch(timeout=WAIT_MS)
            document = reply.json()
            for each in document["variants"]:
                each["name"] = hostile
            route.fulfill(response=reply, json=document)

        page.route("**/variants?*", rename)
        show(page, operated, "variants")
        expect(page.get_by_role("table", name="Variants")).to_contain_text("<img src=x onerror=window.hit=1>")
        assert page.evaluate("window.hit") is None
        assert page.locator("main img").count() == 0


def test_limits_of_a_tenant_are_shown_and_set(page: Page, operated: LiveServer) -> None:
    show(page, operated, "tenants")
    tenants = page.get_by_role("table", name="Tenants")
    tenants.get_by_role("row", name="default").get_by_role("button").click()
    dialog = page.get_by_role("dialog", name="Limits of default")
    dialog.get_by_label("Variants", exact=True).fill("5000")
    dialog.get_by_role("button", name="Set limits").click()
    expect(tenants.get_by_role("row", name="default")).to_contain_text("/ 5,000")
    (listed,) = operated.client.get("/tenants").json()["tenants"]
    assert listed["limits"]["max_variants"] == 5000
    assert listed["limits"]["max_running"] is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_any_view(
    browser: Browser, operated: LiveServer, artifacts: Artifacts, scheme: Scheme
) -> None:
    name = f"seen-{scheme}"
    publish(operated, name, artifacts.plain, artifacts.third)
    assert operated.generate(name, max_new_tokens=4).status_code == 200
    faults: dict[str, list[str]] = {}

    with opened(browser, operated.url, scheme=scheme, lost=True) as page:

        def look(view: str) -> None:
            if found := serious_faults(page):
                faults[view] = found

        expect(page.get_by_role("table", name="Versions in memory")).to_contain_text(name)
        page.get_by_role("region", name="Tokens per second").get_by_text("Table").click()
        look("overview")
        show(page, operated, "variants")
        expect(page.get_by_role("link", name=name)).to_be_visible()
        look("variants")
        page.get_by_role("button", name="Upload…").click()
        look("upload")
        page.keyboard.press("Escape")
        page.get_by_label("Search by name").fill("nothing-has-this")
        expect(page.get_by_text("No name has this part")).to_be_visible()
        look("no variants")
        # The version in force has a background of its own, and tags of each colour.
        assert operated.client.post(f"/variants/{name}/pin").is_success
        show(page, operated, f"variants/{name}")
        expect(row(page, 2).get_by_text("pinned")).to_be_visible()
        row(page, 1).hover()
        look("variant")
        row(page, 2).hover()
        look("variant in force")
        page.get_by_role("button", name="Details of version 1").click()
        look("details")
        page.get_by_role("dialog").get_by_role("button", name="Delete version…").click()
        look("delete a version")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Roll back to v1…").click()
        look("roll back")
        page.get_by_role("dialog").get_by_role("button", name="Roll back to v1").click()
        expect(page.get_by_text("v1 active")).to_be_visible()
        look("rolled back")
        show(page, operated, "variants/absent")
        expect(page.get_by_text("There is no such variant")).to_be_visible()
        look("no variant")
        show(page, operated, "playground")
        page.get_by_label("Left variant").fill(name)
        page.get_by_label("Right variant").fill("absent")
        page.get_by_label("Prompt").fill("hello")
        page.get_by_label("Form").select_option("completion")
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_role("region", name="Left answer")).to_contain_text("ended by")
        expect(page.get_by_role("region", name="Right answer").get_by_role("alert")).to_be_visible()
        look("playground")
        show(page, operated, "tenants")
        expect(page.get_by_role("table", name="Tenants")).to_contain_text("default")
        look("tenants")
        page.get_by_role("table", name="Tenants").get_by_role("row", name="default").get_by_role(
            "button"
        ).click()
        look("limits")
    assert operated.client.post(f"/variants/{name}/unpin").is_success
    assert not faults, faults
