"""Pages and scripts of the dashboard, for everybody: they hold nothing of a job.

Scripts come from this address alone, and nothing that stands in a page is ever run: what a model wrote cannot become
part of the page (`static/dom.js` sets text, never markup).
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(__file__).with_name("static")
PREFIX = "/static/"
PLOTLY = "plotly.min.js"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "vary": "accept-encoding",
    # Asked for again each time, answered by 304: an update of the package is seen at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _Page:
    etag: str
    packed: bytes


class Pages:
    """ASGI middleware: answers for pages and scripts; what others answer is kept out of caches."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = {PREFIX + path.name: path for path in STATIC.iterdir() if path.suffix in TYPES}
        self._files["/"] = self._files.pop(f"{PREFIX}index.html")
        if (plotly := _plotly()) is not None:
            self._files[PREFIX + PLOTLY] = plotly
        self._pages: dict[str, _Page] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in self._files:
            response = await self._answer(scope["path"], Headers(scope=scope))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, _uncached(send))

    async def _answer(self, path: str, headers: Headers) -> Response:
        file = self._files[path]
        page = self._pages.get(path)
        if page is None:
            page = self._pages[path] = await asyncio.to_thread(_packed, file)
        response_headers = {**HEADERS, "etag": page.etag}
        if page.etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=response_headers)
        body = page.packed
        if "gzip" in headers.get("accept-encoding", ""):
            response_headers["content-encoding"] = "gzip"
        else:
            body = await asyncio.to_thread(gzip.decompress, page.packed)
        return Response(body, headers=response_headers, media_type=TYPES[file.suffix])


def _packed(file: Path) -> _Page:
    content = file.read_bytes()
    return _Page(f'"{hashlib.sha256(content).hexdigest()[:32]}"', gzip.compress(content, 6, mtime=0))


def _plotly() -> Path | None:
    """The script in the package `plotly`, which is not imported: that would take a second and is of no use."""
    spec = find_spec("plotly")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "package_data" / PLOTLY
        if path.is_file():
            return path
    return None


def _uncached(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(raw=message["headers"]).setdefault("cache-control", "no-store")
        await send(message)

    return sent
