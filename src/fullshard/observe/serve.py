"""Serves one page on this machine's loopback device, for `fullshard report --watch`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fullshard.errors import ConfigError, FullshardError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def page_server(render: Callable[[], str], port: int = 0) -> ThreadingHTTPServer:
    """A server of one page, which is made anew for every request.

    Args:
        render: Returns the page; a FullshardError becomes the answer, and the server goes on.
        port: Port to listen on; 0: a free one.

    Raises:
        ConfigError: The port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, text = HTTPStatus.OK, "text/html", ""
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):  # a name of another site that leads here
                status, kind, text = HTTPStatus.FORBIDDEN, "text/plain", "expected a local address"
            elif self.path.partition("?")[0] != "/":
                status, kind, text = HTTPStatus.NOT_FOUND, "text/plain", "the page is at /"
            else:
                try:
                    text = render()
                except FullshardError as error:
                    status, kind, text = HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug(format, *args)

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port: expected a free port, got {port} ({error}). Without it, any is taken."
        ) from error
