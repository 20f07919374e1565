"""`/docs`: the page and its files come from the server that is asked, and from nowhere else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from fastapi import FastAPI

from server.api.service import Service
from server.app import create_admin_app, create_app
from tests.server.helpers.http_app import make_service, settings_of
from tests.server.helpers.live_server import error_of

URL = "http://test/docs"
OTHER_HOST = re.compile(r"""(?:url\(|@import)\s*["']?\s*(?:https?:)?//""")


class NamedByPage(HTMLParser):
    """Collects the addresses that a page names, and the text of its own scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = [value for name, value in attrs if name in ("src", "href", "action") and value]
        self.addresses += found
        self._in_script = tag == "script" and not found

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False


def ask(tmp_path: Path, make: Callable[[Service], FastAPI], *paths: str) -> list[httpx.Response]:
    """Ask an application for paths, without a key."""

    async def main() -> list[httpx.Response]:
        service = make_service(settings_of(tmp_path, tmp_path / "registry", auth="keys", admin_port=1))
        transport = httpx.ASGITransport(make(service))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return [await client.get(path) for path in paths]
        finally:
            await service.close()

    return asyncio.run(main())


@pytest.mark.parametrize("make", [create_app, create_admin_app])
def test_the_page_and_all_that_it_names_are_answered_by_each_port(
    tmp_path: Path, make: Callable[[Service], FastAPI]
) -> None:
    (page,) = ask(tmp_path, make, "/docs")
    assert page.status_code == 200
    named = NamedByPage(page.text)
    (document,) = re.findall(r"url: '(.*?)'", "".join(named.scripts))
    addresses = [urljoin(URL, each) for each in (*named.addresses, document) if not each.startswith("data:")]
    assert {urlsplit(address).hostname for address in addresses} == {"test"}
    replies = ask(tmp_path, make, *addresses)
    assert [reply.status_code for reply in replies] == [200] * 3
    assert {reply.headers["Content-Type"].partition(";")[0] for reply in replies} == {
        "text/javascript",
        "text/css",
        "application/json",
    }
    (style,) = [reply.text for reply in replies if reply.headers["Content-Type"].startswith("text/css")]
    assert "swagger-ui" in style
    assert OTHER_HOST.search(style) is None


def test_the_policy_lets_the_page_reach_its_own_server_alone(tmp_path: Path) -> None:
    (page,) = ask(tmp_path, create_app, "/docs")
    directives = dict(
        each.strip().partition(" ")[::2] for each in page.headers["Content-Security-Policy"].split(";")
    )
    assert directives["default-src"] == "'none'"
    (script,) = NamedByPage(page.text).scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert directives["script-src"] == f"'self' 'sha256-{digest}'"
    assert directives["connect-src"] == "'self'"
    sources = {source for value in directives.values() for source in value.split()}
    assert sources == {"'none'", "'self'", "data:", "'unsafe-inline'", f"'sha256-{digest}'"}


def test_no_other_file_of_the_package_is_sent(tmp_path: Path) -> None:
    for reply in ask(tmp_path, create_app, "/docs/favicon.png", "/docs/..%2f__init__.py"):
        assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
