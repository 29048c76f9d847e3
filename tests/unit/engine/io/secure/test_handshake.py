from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest

from tests.certificates import LOOPBACK, Authority
from tests.unit.engine.io.secure.meeting import LIMIT_S, meet, secure_pair, tcp_pair
from torchweft.engine.io.secure import TlsOptions, secure_client, secure_server
from torchweft.engine.wire.frames import HEADER
from torchweft.engine.wire.messages import Kind
from torchweft.errors import TlsError

Side = Callable[[socket.socket], object]


def client_of(options: TlsOptions) -> Side:
    return lambda connection: secure_client(connection, options, LIMIT_S)


def server_of(options: TlsOptions) -> Side:
    return lambda connection: secure_server(connection, options, LIMIT_S)


def foreign_client(configure: Callable[[ssl.SSLContext], None]) -> Side:
    """Returns a client outside Weft that trusts every server and reads the server's answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    configure(context)

    def run(connection: socket.socket) -> object:
        with context.wrap_socket(connection) as secure:
            return secure.recv(100)

    return run


def speaks_weft(context: ssl.SSLContext) -> None:
    context.set_alpn_protocols(["weft"])


def is_refused(outcome: object, reason: str) -> bool:
    assert isinstance(outcome, TlsError), outcome
    assert reason in outcome.reason, outcome
    return True


def test_what_is_sent_is_not_to_be_read_on_the_way(authority: Authority) -> None:
    with secure_pair(authority.options(), authority.options()) as (client, server):
        client.sendall(b"the weights of layer 3")
        on_the_way = server._socket.dup()
        with on_the_way:
            on_the_way.settimeout(LIMIT_S)
            assert b"weights" not in on_the_way.recv(100, socket.MSG_PEEK)
        assert server.recv(100) == b"the weights of layer 3"


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_certificate_of_another_authority_is_refused(
    authority: Authority, stranger: Authority, who: str
) -> None:
    ours = authority.options()
    theirs = stranger.options(ca=authority.path)  # It trusts our authority; we do not trust its.
    if who == "client":
        client, server = meet(client_of(theirs), server_of(ours))
        assert is_refused(server, "does not trust its certificate")
        assert is_refused(client, "unknown ca")
    else:
        client, server = meet(client_of(ours), server_of(theirs))
        assert is_refused(client, "does not trust its certificate")
        assert is_refused(server, "unknown ca")


@pytest.mark.parametrize("who", ["client", "server"])
def test_an_expired_certificate_is_refused(authority: Authority, who: str) -> None:
    ours = authority.options()
    theirs = authority.options(certificate=authority.certificate(is_expired=True))
    if who == "client":
        client, server = meet(client_of(theirs), server_of(ours))
    else:
        server, client = meet(client_of(ours), server_of(theirs))
    assert is_refused(server, "certificate has expired")
    assert is_refused(client, "certificate expired")
    for outcome in (server, client):
        assert "; renew that certificate, or set the clock of the host" in str(outcome)


def test_a_client_without_certificate_is_refused_where_both_must_have_one(
    authority: Authority,
) -> None:
    client, server = meet(foreign_client(speaks_weft), server_of(authority.options()))
    assert is_refused(server, "it has shown no certificate")
    assert "WEFT_TLS_MUTUAL=0" in str(server)
    assert isinstance(client, ssl.SSLError)


def test_a_client_without_certificate_is_welcome_where_only_servers_must_have_one(
    authority: Authority,
) -> None:
    options = authority.options(mutual=False)
    client, server = meet(foreign_client(speaks_weft), server_of(options))
    assert not isinstance(server, Exception)
    assert client == b"\1"


def test_an_old_version_of_tls_is_refused(authority: Authority) -> None:
    def old(context: ssl.SSLContext) -> None:
        speaks_weft(context)
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    client, server = meet(foreign_client(old), server_of(authority.options(mutual=False)))
    assert is_refused(server, "it speaks no TLS that is new enough")
    assert isinstance(client, ssl.SSLError)


def test_a_client_of_another_protocol_is_refused(authority: Authority) -> None:
    def http(context: ssl.SSLContext) -> None:
        context.set_alpn_protocols(["http/1.1"])

    _, server = meet(foreign_client(http), server_of(authority.options(mutual=False)))
    assert is_refused(server, "does not speak Weft's protocol")


def test_a_server_of_another_protocol_is_refused(authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate())

    def serve(connection: socket.socket) -> object:
        with context.wrap_socket(connection, server_side=True) as secure:
            return secure.recv(100)

    client, _ = meet(client_of(authority.options()), serve)
    assert is_refused(client, "does not speak Weft's protocol")


@pytest.mark.parametrize(
    "words", [HEADER.pack(Kind.HELLO, 0, 0, 9, 9) + b"x" * 9, b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_plain_client_is_told_apart(authority: Authority, words: bytes) -> None:
    def talk(connection: socket.socket) -> object:
        connection.sendall(words)
        return connection.recv(100)

    _, server = meet(talk, server_of(authority.options()))
    assert is_refused(server, "it does not speak TLS")
    assert "every worker, or on none" in str(server)


@pytest.mark.parametrize("name", ["trainer.example", LOOPBACK])
def test_an_expected_name_is_checked_by_both_sides(authority: Authority, name: str) -> None:
    strict = authority.options(name=name, certificate=authority.certificate(name))
    other = authority.options(certificate=authority.certificate("other.example"))
    with secure_pair(strict, strict):
        pass
    client, _ = meet(client_of(strict), server_of(other))
    assert is_refused(client, f"made out to other.example, not to {name!r}")
    client, server = meet(client_of(other), server_of(strict))
    assert is_refused(server, f"made out to other.example, not to {name!r}")
    assert is_refused(client, "it closed the connection during the handshake")


def test_one_byte_at_a_time_does_not_gain_time(authority: Authority) -> None:
    client, server = tcp_pair()
    is_over = threading.Event()

    def drip() -> None:
        for byte in b"\x16\3\1\x40\0\1\0\x3f\xfc" + bytes(1 << 14):
            client.sendall(bytes([byte]))
            if is_over.wait(0.005):
                return

    with client, server:
        dripping = threading.Thread(target=drip)
        dripping.start()
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            secure_server(server, authority.options(), 0.2)
        took_s = time.monotonic() - began_s
        is_over.set()
        dripping.join(LIMIT_S)
    assert took_s < 5
