"""The live display of ``torchweft top`` in a browser, through Textual's web server.

Each page that is opened starts the command once more, as on a terminal. A page is shown only to a
browser that has the token: it comes in the address that the command prints, and stays as a cookie
that scripts and other sites cannot use.

A browser sends the cookie to all servers of the host, whatever their port, and lets pages of these
servers open connections to this one. So a request of another page is refused by its ``Origin``. A
page of a foreign name that was made to lead here (DNS rebinding) is refused by its ``Host``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from torchweft.errors import ConfigurationError

TOKEN = "token"
_MOST_CONNECTIONS = 64
"""Connections without the token that may be open; beyond it, the oldest one is closed."""
_SILENCE_S = 10.0
"""Seconds within which a connection sends its first request with the token."""
_COOKIE = "torchweft-top"
_TOKEN_BYTES = 32

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(arguments: Sequence[str], host: str, port: int, say: Callable[[str], object]) -> None:
    """Serves the display until Ctrl-C.

    Args:
        arguments: The command line of ``torchweft`` that draws the display.
        host: The address to listen at.
        port: The port; 0 for a free one.
        say: Is told the address of the page, with the token.

    Raises:
        ConfigurationError: It cannot listen there.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise ConfigurationError(
            f"torchweft top cannot listen at {host}, port {port}: {error}; name another --host or "
            "--port, or leave --port out for a free one"
        ) from error
    with listener:
        server = _Server(arguments, host)
        shown = f"[{host}]" if family is socket.AF_INET6 else host
        say(f"http://{shown}:{listener.getsockname()[1]}/?{TOKEN}={server.token}")
        asyncio.run(server.run(listener))


class _Server(Server):
    """Textual's server, for those who have the token.

    Args:
        arguments: The command line of ``torchweft`` that draws the display.
        host: The address to listen at, as it was given.
    """

    def __init__(self, arguments: Sequence[str], host: str) -> None:
        self._names = frozenset({"localhost", host, socket.gethostname(), socket.getfqdn()})
        command = shlex.join([sys.executable, "-m", "torchweft", *arguments])
        super().__init__(command, title="torchweft top")
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._strangers: dict[asyncio.Transport, None] = {}

    async def run(self, listener: socket.socket) -> None:
        """Serves until it is cancelled."""
        runner = web.AppRunner(await self._make_app(), handle_signals=False, access_log=None)
        await runner.setup()
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            while True:
                connection, _ = await loop.sock_accept(listener)
                make: Any = runner.server
                with contextlib.suppress(OSError):
                    self._admit((await loop.connect_accepted_socket(make, connection))[0])
        finally:
            await runner.cleanup()

    def _admit(self, transport: asyncio.Transport) -> None:
        """Closes a new connection if it does not show the token soon; makes place for it."""
        for each in [each for each in self._strangers if each.is_closing()]:
            del self._strangers[each]
        if len(self._strangers) >= _MOST_CONNECTIONS:
            self._end_stranger(next(iter(self._strangers)))
        self._strangers[transport] = None
        asyncio.get_running_loop().call_later(_SILENCE_S, self._end_stranger, transport)

    def _end_stranger(self, transport: asyncio.Transport) -> None:
        if transport in self._strangers:
            del self._strangers[transport]
            transport.abort()

    async def on_startup(self, app: web.Application) -> None:
        """Says nothing: the command has said the address."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._checked)
        return app

    @property
    def _checked(self) -> Any:
        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self._is_own(request):
                return web.Response(
                    status=403,
                    text="open the address that torchweft top printed, or that of a tunnel to it; "
                    "other pages, and other names of this host, are refused\n",
                )
            if self._is_token(request.query.get(TOKEN, "")):
                # The token leaves the address bar.
                answer = web.Response(status=302, headers={"Location": request.path})
                answer.set_cookie(_COOKIE, self.token, httponly=True, samesite="Strict")
                return answer
            if not self._is_token(request.cookies.get(_COOKIE, "")):
                return web.Response(
                    status=403, text="open the address that torchweft top printed\n"
                )
            if request.transport is not None:
                self._strangers.pop(request.transport, None)
            # A page may be opened through a tunnel, at another address than that of the server.
            self.public_url = f"{request.scheme}://{request.host}"
            return await handler(request)

        return checked

    def _is_own(self, request: web.Request) -> bool:
        """Whether a request comes from a page of this server, or from the address bar."""
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"{request.scheme}://{request.host}":
            return False
        try:
            name = urlsplit(f"//{request.host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or _is_address(name)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
