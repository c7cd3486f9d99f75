"""Prefect's server, restricted to browsers and clients of this machine.

Prefect accepts any Host and lets any Origin read its answers. A foreign web page in the browser could then read and
change runs, after pointing its own name at the loopback address (DNS rebinding).
"""

import os
from typing import Any

from prefect.server.api.server import create_app
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import (
    ASGIApp,
    Receive,
    Scope,
    Send,
)
from starlette.websockets import WebSocketClose

from vantage.flows.prefect_server.public_address import PUBLIC_ADDRESS

FORBIDDEN = 403
MISDIRECTED = 421
POLICY_VIOLATION = 1008


class OwnHostOnly:
    """Accepts requests to this server's own host names, from its own pages or from no page."""

    def __init__(self, app: ASGIApp, port: int, public_address: str | None = None) -> None:
        """Allow requests to this machine's names; ``public_address``: address of a proxy that passes on requests of
        other machines, such as ``https://prefect.example.org``.
        """
        self._app = app
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._origins = {f"http://{host}" for host in self._hosts}
        if public_address is not None:
            self._hosts.add(public_address.partition("://")[2].lower())
            self._origins.add(public_address.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or open one web socket."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
        else:
            messages = {
                MISDIRECTED: "this server has another name",
                FORBIDDEN: "this page is another server's",
            }
            await PlainTextResponse(messages[refusal], refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> int | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return MISDIRECTED
        if any(origin.lower() not in self._origins for origin in headers.getlist("origin")):
            return FORBIDDEN
        return None


def create_guarded_app() -> Any:
    """Return the whole application, for ``uvicorn --factory``; its port is ``PREFECT_SERVER_API_PORT``."""
    return OwnHostOnly(
        create_app(),
        port=int(os.environ["PREFECT_SERVER_API_PORT"]),
        public_address=os.environ.get(PUBLIC_ADDRESS),
    )
