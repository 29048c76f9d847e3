from __future__ import annotations

import pytest

from tests.certificates import Authority
from torchweft.engine.io.secure.connection import TlsStream
from torchweft.engine.io.secure.options import PROTOCOL


@pytest.fixture
def ends(authority: Authority) -> tuple[TlsStream, TlsStream]:
    """Both ends of a connection in memory, after the handshake."""
    options = authority.options()
    client = TlsStream(options.client_context(), is_server=False)
    server = TlsStream(options.server_context(), is_server=True)
    assert not client.shake_hands()
    server.feed(client.take())
    assert not server.shake_hands()
    client.feed(server.take())
    assert client.shake_hands()
    server.feed(client.take())
    assert server.shake_hands()
    return client, server


def decrypt(stream: TlsStream, *sizes: int) -> list[bytes]:
    spaces = [memoryview(bytearray(size)) for size in sizes]
    stream.decrypt_into(spaces)
    return list(map(bytes, spaces))


def test_both_know_what_is_spoken_and_who_is_there(ends: tuple[TlsStream, TlsStream]) -> None:
    for end in ends:
        assert end.protocol == PROTOCOL
        assert end.certificate_names() == ["127.0.0.1"]


def test_the_handshake_leaves_nothing_to_be_sent(ends: tuple[TlsStream, TlsStream]) -> None:
    # There are no session tickets: the next reader would have to send them.
    assert [end.take() for end in ends] == [b"", b""]
    assert all(end.is_dry for end in ends)


def test_what_came_with_the_end_of_the_handshake_is_not_lost(authority: Authority) -> None:
    options = authority.options()
    client = TlsStream(options.client_context(), is_server=False)
    server = TlsStream(options.server_context(), is_server=True)
    client.shake_hands()
    server.feed(client.take())
    server.shake_hands()
    client.feed(server.take())
    assert client.shake_hands()
    client.encrypt(b"early")
    server.feed(client.take())
    assert server.shake_hands()
    assert not server.is_dry
    assert decrypt(server, 5) == [b"early"]


def test_plaintext_fills_several_spaces_across_records(ends: tuple[TlsStream, TlsStream]) -> None:
    client, server = ends
    client.encrypt(b"abc")
    client.encrypt(b"defg")
    server.feed(client.take())
    assert decrypt(server, 2, 3) == [b"ab", b"cde"]
    assert not server.is_dry
    assert decrypt(server, 2) == [b"fg"]
    assert server.is_dry


def test_nothing_comes_of_half_a_record(ends: tuple[TlsStream, TlsStream]) -> None:
    client, server = ends
    client.encrypt(b"whole")
    record = client.take()
    for byte in record[:-1]:
        server.feed(bytes([byte]))
        assert server.decrypt_into([memoryview(bytearray(9))]) == 0
        assert server.is_dry
    server.feed(record[-1:])
    assert decrypt(server, 5) == [b"whole"]


def test_large_plaintext_is_encrypted_at_once(ends: tuple[TlsStream, TlsStream]) -> None:
    client, server = ends
    data = bytes(range(256)) * 4096
    client.encrypt(data)
    server.feed(client.take())
    assert decrypt(server, len(data)) == [data]


def test_a_farewell_ends_it_after_all_that_came_before(ends: tuple[TlsStream, TlsStream]) -> None:
    client, server = ends
    client.encrypt(b"last")
    client.say_farewell()
    server.feed(client.take())
    assert decrypt(server, 4) == [b"last"]
    assert server.decrypt_into([memoryview(bytearray(1))]) == 0
    assert server.has_ended
    assert server.is_dry


def test_who_has_said_farewell_can_write_no_more(ends: tuple[TlsStream, TlsStream]) -> None:
    client, _ = ends
    client.say_farewell()
    with pytest.raises(BrokenPipeError, match="this side has ended"):
        client.encrypt(b"x")


def test_who_was_told_farewell_can_still_write(ends: tuple[TlsStream, TlsStream]) -> None:
    client, server = ends
    client.say_farewell()
    server.feed(client.take())
    server.decrypt_into([memoryview(bytearray(1))])
    server.encrypt(b"too late, but no error")


def test_nonsense_is_an_error_and_stays_one(ends: tuple[TlsStream, TlsStream]) -> None:
    client, server = ends
    client.encrypt(b"good")
    server.feed(client.take() + b"nonsense")
    assert decrypt(server, 4) == [b"good"]
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="not what the other side encrypted"):
            decrypt(server, 4)
    assert server.has_output  # An alert that informs the other side.
