"""The display in a browser is for those who have the token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("textual_serve")
aiohttp = pytest.importorskip("aiohttp")

from torchweft.observe import web  # noqa: E402
from torchweft.observe.web import _Server  # noqa: E402

LIMIT_S = 30.0
Session = aiohttp.ClientSession


def browse(visit: Callable[[Session, str, str], Awaitable[None]]) -> None:
    """Serves, and visits the page with its address and its token."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = _Server(["top", "cafe"], "127.0.0.1")
            serving = asyncio.ensure_future(server.run(listener))
            try:
                jar = aiohttp.CookieJar(unsafe=True)  # Cookies of an IP address.
                async with Session(cookie_jar=jar) as session:
                    port = listener.getsockname()[1]
                    await visit(session, f"http://127.0.0.1:{port}", server.token)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/ws", "/static/js/textual.js"])
def test_nothing_is_shown_without_the_token(path: str) -> None:
    async def visit(session: Session, address: str, token: str) -> None:
        async with session.get(address + path, cookies={"torchweft-top": "wrong"}) as answer:
            assert answer.status == 403
            assert token not in await answer.text()

    browse(visit)


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_have() -> None:
    async def visit(session: Session, address: str, token: str) -> None:
        first = f"{address}/?token={token}"
        async with session.get(first, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (302, "/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
        async with session.get(address) as answer:
            assert answer.status == 200
            page = await answer.text()
        assert token not in page
        # The page connects to the address at which it was opened, as through a tunnel.
        assert f"ws{address.removeprefix('http')}/ws" in page

    browse(visit)


def test_pages_of_other_origins_and_foreign_names_are_refused_with_the_cookie() -> None:
    async def visit(session: Session, address: str, token: str) -> None:
        async with session.get(f"{address}/?token={token}") as answer:
            assert answer.status == 200
        port = address.rpartition(":")[2]
        refused: list[dict[str, str]] = [
            {"Origin": "http://evil.example"},
            {"Origin": "http://127.0.0.1:1"},
            {"Origin": f"https://127.0.0.1:{port}"},
            {"Origin": "null"},
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
            {"Host": "127.0.0.1.evil.example"},
            {"Host": "[::1"},
        ]
        # A tunnel has another port, and maybe another address.
        accepted: list[dict[str, str]] = [
            {},
            {"Origin": address},
            {"Host": "localhost:9000", "Origin": "http://localhost:9000"},
            {"Host": "[::1]:9000"},
            {"Host": "10.1.2.3"},
        ]
        cookies = {"torchweft-top": token}
        for path in ("/", "/ws", f"/?token={token}"):
            for headers in refused:
                async with session.get(address + path, headers=headers, cookies=cookies) as answer:
                    assert answer.status in (400, 403), (path, headers)
        for headers in accepted:
            async with session.get(address, headers=headers, cookies=cookies) as answer:
                assert answer.status == 200, headers

    browse(visit)


def test_connections_without_the_token_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_MOST_CONNECTIONS", 3)
    monkeypatch.setattr(web, "_SILENCE_S", 0.5)

    async def visit(session: Session, address: str, token: str) -> None:
        port = int(address.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _, writer in silent:
            writer.write(b"GET / HTTP/1.1\r\nHost: 127")
        # The first ones are closed at once, the others when their time is up.
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        async with session.get(f"{address}/?token={token}") as answer:
            assert answer.status == 200

    browse(visit)
