"""`/docs`: a page that shows the calls of `/openapi.json` and sends them. It loads nothing from another host.

The page is FastAPI's, the files are those of Swagger UI in the package fastapi-offline.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from server.api.json_replies import shared_reply

PACKAGE = "fastapi-offline"
ASSETS: Mapping[str, str] = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
# The URLs of assets name the package's version, so that an upgrade is seen at once.
CACHED = "public, max-age=604800, immutable"
INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)

router = APIRouter()


@router.get("/docs")
async def docs_page() -> Response:
    """Show every call of this port, and send calls by hand. Loads nothing from another host."""
    return _page()


@router.get("/docs/{asset}")
async def docs_asset(asset: str) -> Response:
    """Send a file of the page `/docs`."""
    if asset not in ASSETS:
        raise HTTPException(404)
    content = await run_in_threadpool(_content, asset)
    return shared_reply(content, ASSETS[asset], {"Cache-Control": CACHED})


@cache
def _page() -> HTMLResponse:
    script, style = (f"docs/{asset}?v={version(PACKAGE)}" for asset in ASSETS)
    # Relative addresses hold behind a proxy that adds a path, too.
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Peraxis",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None, "defaultModelsExpandDepth": -1},
    )
    page.headers["Content-Security-Policy"] = _policy(bytes(page.body).decode())
    return page


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows the page's own script and nothing of another host."""
    digests = [hashlib.sha256(script.encode()).digest() for script in INLINE_SCRIPT.findall(page)]
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; connect-src 'self'; img-src 'self' data:; "
        # Swagger UI sets styles of elements.
        "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _content(asset: str) -> bytes:
    """Return an asset; each process reads it once."""
    return (files(PACKAGE.replace("-", "_")) / "static" / asset).read_bytes()
