"""The console's files over HTTP, without a key: their types, their policy, how they are cached, and what is others'."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from server.api.console import DIRECTORY, MEDIA_TYPES
from server.app import create_admin_app, create_app
from tests.server.api.test_docs_page import NamedByPage
from tests.server.helpers.http_app import make_service, settings_of
from tests.server.helpers.live_server import error_of

FILES = sorted(path for path in DIRECTORY.iterdir() if path.suffix in MEDIA_TYPES)
OWN = {
    "index.html", "icon.svg", "style.css", "api.js", "app.js", "live.js", "overview.js", "playground.js", "state.js",
    "tenants.js", "ui.js", "variants.js",
}  # fmt: skip
IMPORT = re.compile(r"""\bfrom\s*["']([^"']+)["']|\bimport\s*\(?\s*["']([^"']+)["']""")
OTHER_HOST = re.compile(r"""(?:url\(|@import|fetch\(|src=|href=)\s*["']?\s*(?:https?:)?//""")
ROW = re.compile(r"^\| `([^`]+)` \| .* \| `([0-9a-f]{64})` \|$", re.MULTILINE)
# Compressed: what is others', and all of it.
MAX_OTHERS, MAX_COMPRESSED = 32_000, 72_000


def ask(
    tmp_path: Path, *paths: str, on_admin_port: bool = False, headers: Mapping[str, str] | None = None
) -> list[httpx.Response]:
    """Ask a server with keys for paths, without a key."""

    async def main() -> list[httpx.Response]:
        port = 1 if on_admin_port else None
        service = make_service(settings_of(tmp_path, tmp_path / "registry", auth="keys", admin_port=port))
        make = create_admin_app if on_admin_port else create_app
        transport = httpx.ASGITransport(make(service))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return [await client.get(path, headers=headers) for path in paths]
        finally:
            await service.close()

    return asyncio.run(main())


@pytest.mark.parametrize("on_admin_port", [False, True])
def test_the_page_and_all_that_it_names_are_answered_without_a_key(
    tmp_path: Path, on_admin_port: bool
) -> None:
    (page,) = ask(tmp_path, "/", on_admin_port=on_admin_port)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    named = NamedByPage(page.text)
    assert named.scripts == []
    assert not any(urlsplit(address).netloc or address.startswith("/") for address in named.addresses)
    replies = ask(tmp_path, *(urljoin("/", each) for each in named.addresses), on_admin_port=on_admin_port)
    assert len(replies) > 3
    assert {reply.status_code for reply in replies} == {200}


def test_the_policy_allows_scripts_styles_and_calls_of_this_server_and_nothing_else(tmp_path: Path) -> None:
    for reply in ask(tmp_path, "/", "/console/app.js", "/console/icon.svg"):
        directives = dict(
            each.strip().partition(" ")[::2] for each in reply.headers["Content-Security-Policy"].split(";")
        )
        assert directives["default-src"] == "'none'"
        assert set(directives.values()) == {"'none'", "'self'"}
        assert "Set-Cookie" not in reply.headers
        assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_a_file_is_sent_again_only_when_it_has_changed(tmp_path: Path) -> None:
    for path in ("/", "/console/style.css"):
        (first,) = ask(tmp_path, path)
        assert first.headers["Cache-Control"] == "no-cache"
        etag = first.headers["ETag"]
        same, other = (
            ask(tmp_path, path, headers={"If-None-Match": given})[0] for given in (f'"x", {etag}', '"x"')
        )
        assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", etag)
        assert (other.status_code, other.content) == (200, first.content)


def test_every_file_has_its_type_and_comes_compressed_to_who_takes_it(tmp_path: Path) -> None:
    named = [path for path in FILES if path.name != "index.html"]
    plain = ask(tmp_path, *(f"/console/{path.name}" for path in named), headers={"Accept-Encoding": "br"})
    for path, reply in zip(named, plain, strict=True):
        assert reply.content == path.read_bytes()
        assert reply.headers["Content-Type"] == MEDIA_TYPES[path.suffix]
        assert "Content-Encoding" not in reply.headers
    zipped = ask(tmp_path, *(f"/console/{path.name}" for path in named), headers={"Accept-Encoding": "gzip"})
    assert [reply.content for reply in zipped] == [path.read_bytes() for path in named]
    assert {reply.headers["Content-Encoding"] for reply in zipped} == {"gzip"}
    sizes = {path.name: len(gzip.compress(path.read_bytes())) for path in FILES}
    assert sum(sizes.values()) < MAX_COMPRESSED
    assert sum(size for name, size in sizes.items() if name not in OWN) < MAX_OTHERS


@pytest.mark.parametrize("name", ["README.md", "index.html", "LICENSE-htm", "..%2f__init__.py", "absent.js"])
def test_no_other_file_is_sent(tmp_path: Path, name: str) -> None:
    (reply,) = ask(tmp_path, f"/console/{name}")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_imports_its_neighbours_alone_and_names_no_other_host(path: Path) -> None:
    text = path.read_text()
    if path.suffix in (".js", ".mjs"):
        imported = [one or other for one, other in IMPORT.findall(text)]
        assert all(name.startswith("./") and (DIRECTORY / name).exists() for name in imported), imported
    assert OTHER_HOST.search(text) is None
    assert "document.cookie" not in text
    assert "innerHTML" not in text or path.name in ("preact.mjs", "uPlot.iife.min.js")


def test_files_of_others_are_those_that_the_readme_lists() -> None:
    listed = dict(ROW.findall((DIRECTORY / "README.md").read_text()))
    assert set(listed) == {path.name for path in FILES} - OWN
    for name, digest in listed.items():
        assert hashlib.sha256((DIRECTORY / name).read_bytes()).hexdigest() == digest
    for package in ("preact", "htm", "uPlot"):
        assert "Licen" in (DIRECTORY / f"LICENSE-{package}").read_text()
