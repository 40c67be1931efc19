"""TLS in front of a server that has none: takes TLS connections and passes plain bytes on, both ways.

    client ──TLS──▶ proxy ──plain──▶ unix:///path/of/a/socket or tcp://host:port

The embedded Valkey is built without TLS, so tests of `rediss://` put this in front of it. In a thread of its own
(`tls_proxy`), or as a process:

    python -m tests.support.tls_proxy --target unix:///tmp/x/s --cert server.pem --key server.key [--port 6390]

When the target is away a connection is closed at once, as a server that is down would do; when it is back, new
connections reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.waiting import PATIENCE

CHUNK = 256 * 1024


class TlsProxy:
    """One listener on a loopback port; use from one event loop."""

    def __init__(self, target: str, context: ssl.SSLContext) -> None:
        self._target, self._context = urlsplit(target), context
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        """Listen on 127.0.0.1; port 0 takes any free one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by stop: this task ends with its connection, nobody awaits its result
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._target.scheme == "unix":
            behind = await asyncio.open_unix_connection(self._target.path)
        else:
            behind = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            ways = [asyncio.create_task(_pump(reader, behind[1])), asyncio.create_task(_pump(behind[0], writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            behind[1].transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


@contextmanager
def tls_proxy(target: str, context: ssl.SSLContext, port: int = 0) -> Iterator[int]:
    """A proxy in a thread for the duration of a block; gives its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tls-proxy", daemon=True)
    thread.start()
    try:
        proxy = TlsProxy(target, context)
        asyncio.run_coroutine_threadsafe(proxy.start(port), loop).result(PATIENCE)
        try:
            yield proxy.port
        finally:
            asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(PATIENCE)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


async def _run(target: str, context: ssl.SSLContext, port: int) -> None:
    proxy = TlsProxy(target, context)
    await proxy.start(port)
    print(proxy.port, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Print the port, then serve until killed."""
    parser = argparse.ArgumentParser(description="TLS in front of a plain server")
    parser.add_argument("--target", required=True, help="unix:///path or tcp://host:port")
    parser.add_argument("--cert", required=True, type=Path)
    parser.add_argument("--key", required=True, type=Path)
    parser.add_argument("--client-ca", type=Path, help="only clients with a certificate of this authority")
    parser.add_argument("--port", type=int, default=0)
    found = parser.parse_args()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(found.cert, found.key)
    if found.client_ca:
        context.load_verify_locations(found.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    with suppress(KeyboardInterrupt):
        asyncio.run(_run(found.target, context, found.port))


if __name__ == "__main__":
    main()
