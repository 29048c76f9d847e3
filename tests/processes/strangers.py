"""Attacks that a stranger can try on a worker over connections of its own, with raw sockets only.

Each attack is a row of the table in ``docs/security/attackers.md``: the attack and the answer.
``tests.processes.strangers_table`` writes that page from a run.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.processes.test_unpickling import pickled_call
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import (
    LIMIT_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Greeting,
    Handshake,
    frame_with,
    new_voucher,
)
from torchweft.engine.io.secure import TlsOptions, secure_client
from torchweft.engine.protocol.connecting import Hello, Purpose
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.secret import Secret

LIMIT_S = 10.0
GREETING_S = 1.0
"""How long a greeting may take at the victim; the default is 10 s."""
AT_ONCE, AT_THE_LIMIT = "at once", "when the time for a greeting is up"
ANOTHER_SECRET = Secret(b"the secret of another group")
CHALLENGE, REFUSAL = "a challenge", "that it proved nothing"
GONE = "the worker that was here is gone"

_ALERT_RECORD = 21


class Got(NamedTuple):
    """The outcome of an attack: the victim's answers, their size, and when it hung up."""

    said: tuple[str, ...]
    size_bytes: int
    hung_up: str

    def __str__(self) -> str:
        size = f" ({self.size_bytes} bytes)" if self.size_bytes else ""
        return f"{in_words(self.said)}{size}; hung up {self.hung_up}"


def in_words(said: tuple[str, ...]) -> str:
    return ", then ".join(said) or "nothing"


@dataclass
class Victim:
    """A worker that is attacked.

    Attributes:
        address: The address where it listens.
        id: Its id.
        secret: The group's secret; only attackers that have it use it.
        token: The token of the run, from the rendezvous store.
        session: The name of the session between it and another worker, whose id is ``other``.
        dial_at: Makes it, or the other, dial an address, as that of the worker with the given id.
        tls: The TLS options of its group.
    """

    address: addresses.TcpAddress
    id: int
    other: int
    secret: Secret
    token: str
    session: str
    dial_at: Callable[[str, str, int], Callable[[], str]]
    tls: TlsOptions | None = None
    told_dialler: str = field(default="", init=False)

    @property
    def key(self) -> Secret:
        """The key whose possession members prove."""
        return self.secret.derive(self.token)


Attack = Callable[[Victim], Got]


class Row(NamedTuple):
    """A row of the table: an attack and its expected outcome."""

    title: str
    attack: Attack
    said: tuple[str, ...]
    hung_up: str


# Talking


@contextmanager
def connected(victim: Victim) -> Iterator[socket.socket]:
    with addresses.dial(victim.address, LIMIT_S) as connection:
        connection.settimeout(LIMIT_S)
        yield connection


def read_all(connection: Any, begun_s: float, before: bytes = b"") -> Got:
    """Reads until the victim hangs up."""
    heard, alerts = bytearray(before), ()
    try:
        while part := connection.recv(4096):
            heard += part
    except TimeoutError:
        raise AssertionError(f"still connected; it said {bytes(heard)!r}") from None
    except ssl.SSLError as error:
        alerts = (_alert(error),)
    except OSError:
        pass
    elapsed_s = time.monotonic() - begun_s
    if elapsed_s < GREETING_S * 0.75:
        hung_up = AT_ONCE
    else:
        assert GREETING_S * 0.9 < elapsed_s < GREETING_S + 2.0, f"it took {elapsed_s:.2f} s"
        hung_up = AT_THE_LIMIT
    return Got((*_said(bytes(heard)), *alerts), len(heard), hung_up)


def _said(heard: bytes) -> Iterator[str]:
    if heard[:1] == bytes((_ALERT_RECORD,)):
        yield f"a TLS alert: {_ALERTS.get(heard[6], heard[6])}"
        return
    while heard:
        kind, _, _, size, _ = HEADER.unpack_from(heard)
        content, heard = heard[HEADER_BYTES:][:size], heard[HEADER_BYTES + size :]
        if kind == Kind.CHALLENGE:
            yield CHALLENGE
        elif kind == Kind.GOODBYE and not content:
            yield REFUSAL
        elif kind == Kind.WELCOME:
            yield f'"{json.loads(content[PROOF_BYTES:])["refusal"]}"'
        else:
            yield f"a frame of kind {kind}"


_ALERTS = {70: "protocol version", 48: "unknown CA", 116: "certificate required"}


def _alert(error: ssl.SSLError) -> str:
    reason = (error.reason or "").rpartition("ALERT_")[2]
    return f"a TLS alert: {reason.replace('_', ' ').lower()}"


def send(content: bytes, *, ends: bool = False) -> Attack:
    """Returns an attack that sends ``content`` at once."""

    def run(victim: Victim) -> Got:
        with connected(victim) as connection:
            begun_s = time.monotonic()
            connection.sendall(content)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection, begun_s)

    return run


def drip(content: bytes) -> Attack:
    """Returns an attack that sends ``content`` slowly, byte by byte."""

    def run(victim: Victim) -> Got:
        with connected(victim) as connection:
            begun_s = time.monotonic()
            connection.settimeout(0.02)
            heard = b""
            for place in range(len(content)):
                try:
                    connection.send(content[place : place + 1])
                    part = connection.recv(4096)
                except TimeoutError:
                    continue
                except OSError:
                    break
                if not part:
                    break
                heard += part
            connection.settimeout(LIMIT_S)
            return read_all(connection, begun_s, heard)

    return run


def frame(kind: int, content: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(kind, 0, 0, content))


# Greetings


class Recorder:
    """Records what this side writes and reads; ``change`` may alter written data on its way."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.written = b""
        self.read = bytearray()
        self.change: Callable[[bytes], bytes] = lambda data: data

    def sendall(self, data: bytes) -> None:
        self.written += data
        self._connection.sendall(self.change(data))

    def recv(self, size: int) -> bytes:
        data = self._connection.recv(size)
        self.read += data
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def introduction(victim: Victim) -> Greeting:
    """Returns a greeting that the other member may send."""
    return Greeting(victim.other, facts=Hello(Purpose.INTRODUCTION, victim.id).facts())


def resumption(victim: Victim, session: str) -> Greeting:
    facts = Hello(Purpose.RESUME, victim.id, session, attempt=1 << 20).facts()
    return Greeting(victim.other, facts=facts)


def say_hello(
    connection: Any,
    key: Secret,
    greeting: Greeting,
    change: Callable[[bytes], bytes] = lambda data: data,
) -> tuple[Got, bytes]:
    """Greets with a key, and reads to the end; returns the outcome and the data written."""
    recorder = Recorder(connection)
    recorder.change = change
    begun_s = time.monotonic()
    handshake = Handshake.dial(recorder, key, time.monotonic() + LIMIT_S)  # type: ignore[arg-type]
    connection.settimeout(LIMIT_S)
    handshake.send(Kind.HELLO, greeting)
    connection.settimeout(LIMIT_S)
    return read_all(connection, begun_s, bytes(recorder.read)), recorder.written


def greet(
    key: Callable[[Victim], Secret], greeting: Callable[[Victim], Greeting] = introduction
) -> Attack:
    def run(victim: Victim) -> Got:
        with connected(victim) as connection:
            return say_hello(connection, key(victim), greeting(victim))[0]

    return run


def replay(greeting: Callable[[Victim], Greeting]) -> Attack:
    """Returns an attack that replays a member's greeting."""

    def run(victim: Victim) -> Got:
        with connected(victim) as connection:
            # The greeting changes nothing: it begins no session, and counts as no attempt for one.
            first, said = say_hello(connection, victim.key, greeting(victim))
            assert first.said[-1] not in (CHALLENGE, REFUSAL), first
        with connected(victim) as connection:
            begun_s = time.monotonic()
            connection.sendall(said)
            return read_all(connection, begun_s)

    return run


def flip_bits(victim: Victim) -> Got:
    """Flips one bit of a member's greeting, for every 23rd bit; all outcomes must be equal."""
    results = set()
    size_bits = 8 * (PROOF_BYTES + NONCE_BYTES + 60)
    for bit in range(8 * HEADER_BYTES, 8 * HEADER_BYTES + size_bits, 23):

        def change(data: bytes, bit: int = bit) -> bytes:
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        with connected(victim) as connection:
            results.add(say_hello(connection, victim.key, introduction(victim), change)[0])
    (result,) = results
    return result


def between(who: str, to: Callable[[Victim], int]) -> Attack:
    """Returns an attack that relays the messages of a worker that dials the attacker."""

    def run(victim: Victim) -> Got:
        with socket.create_server((victim.address.host, 0)) as listener:
            listener.settimeout(LIMIT_S)
            address = addresses.TcpAddress(*listener.getsockname()[:2])
            dialled = victim.dial_at(who, str(address), to(victim))
            ours, _ = listener.accept()
        with ours, connected(victim) as connection:
            ours.settimeout(LIMIT_S)
            begun_s = time.monotonic()
            challenge = connection.recv(4096)
            ours.sendall(challenge)
            voucher_bytes = len(frame_with(new_voucher(victim.key, victim.id)))
            connection.sendall(ours.recv(voucher_bytes, socket.MSG_WAITALL))
            connection.sendall(ours.recv(1 << 17))
            answer = connection.recv(4096)
            ours.sendall(answer) if answer else ours.close()
            got = read_all(connection, begun_s, challenge + answer)
        victim.told_dialler = dialled()
        return got

    return run


def another_run(victim: Victim) -> Secret:
    return victim.secret.derive("0" * len(victim.token))


def with_pickle(victim: Victim) -> Got:
    """Sends a call with a pickle in place of a greeting."""
    return send(frame(Kind.HELLO, b"\0" * 64 + pickled_call()) + pickled_call())(victim)


def copy_voucher(victim: Victim) -> Got:
    """Sends the voucher of a connection that is over once more."""
    said = frame_with(new_voucher(victim.key, victim.id))
    with connected(victim) as connection:
        connection.sendall(said)
        assert connection.recv(4096)
    return send(said)(victim)


CLIENT_HELLO = bytes.fromhex("160301007a0100007603031d")

STRANGERS = [
    Row("says nothing", send(b""), (CHALLENGE,), AT_THE_LIMIT),
    Row("hangs up at once", send(b"", ends=True), (CHALLENGE,), AT_ONCE),
    Row("4 KiB of random bytes", send(os.urandom(4096)), (CHALLENGE,), AT_ONCE),
    Row("a request of HTTP", send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), (CHALLENGE,), AT_ONCE),
    Row("TLS, where there is none", send(CLIENT_HELLO * 20), (CHALLENGE,), AT_ONCE),
    Row(
        "half a greeting, then silence",
        send(frame(Kind.HELLO, b"x" * 200)[:100]),
        (CHALLENGE,),
        AT_THE_LIMIT,
    ),
    Row(
        "a greeting, a byte now and then (slow-loris)",
        drip(frame(Kind.HELLO, b"x" * 1000)),
        (CHALLENGE,),
        AT_THE_LIMIT,
    ),
    Row(
        "a greeting of 4 GiB is announced",
        send(HEADER.pack(Kind.HELLO, 0, 0, 0xFFFFFFFF, 0)),
        (CHALLENGE,),
        AT_ONCE,
    ),
    Row(
        "the largest greeting there may be, of nothing but brackets",
        send(frame(Kind.HELLO, b"[" * LIMIT_BYTES)),
        (CHALLENGE, REFUSAL),
        AT_ONCE,
    ),
    Row("no secret: a greeting that proves nothing", send(frame(Kind.HELLO, b"\0" * 200)),
        (CHALLENGE, REFUSAL), AT_ONCE),
    Row("another secret", greet(lambda victim: ANOTHER_SECRET.derive(victim.token)),
        (CHALLENGE, REFUSAL), AT_ONCE),
    Row(
        "the token of the run, which the rendezvous store tells, as another worker without secret",
        greet(lambda victim: Secret(victim.token.encode())),
        (CHALLENGE, REFUSAL),
        AT_ONCE,
    ),
    Row("the secret, and the token of another run", greet(another_run), (CHALLENGE, REFUSAL),
        AT_ONCE),
    Row("what a member said when it came, again", replay(introduction), (CHALLENGE, REFUSAL),
        AT_ONCE),
    Row(
        "what a member said when it resumed a session, again",
        replay(lambda victim: resumption(victim, "another")),
        (CHALLENGE, REFUSAL),
        AT_ONCE,
    ),
    Row(
        "resumes the session of two members, whose name is known, without the secret",
        greet(lambda _: ANOTHER_SECRET, lambda victim: resumption(victim, victim.session)),
        (CHALLENGE, REFUSAL),
        AT_ONCE,
    ),
    Row("what a member says, with one bit changed", flip_bits, (CHALLENGE, REFUSAL), AT_ONCE),
    Row(
        "the worker's own challenge, answered by itself (reflection)",
        between("victim", lambda victim: victim.id),
        (CHALLENGE,),
        AT_ONCE,
    ),
    Row(
        "what a member says to a worker whose address the stranger has now",
        between("other", lambda _: 77),
        (CHALLENGE, f'"{GONE}"'),
        AT_ONCE,
    ),
    Row("a member's voucher, again", copy_voucher, (CHALLENGE,), AT_THE_LIMIT),
    Row(
        "a voucher without the secret",
        lambda victim: send(frame_with(new_voucher(ANOTHER_SECRET, victim.id)))(victim),
        (CHALLENGE,),
        AT_THE_LIMIT,
    ),
    Row("a call with a pickle before a greeting", send(pickled_call()), (CHALLENGE,), AT_ONCE),
    Row("a pickle in place of a greeting", with_pickle, (CHALLENGE, REFUSAL), AT_ONCE),
    Row(
        "a frame of 2 TiB is announced before a greeting",
        send(HEADER.pack(Kind.CALL, 0, 1, 0, 0) + (1 << 41).to_bytes(8, "little")),
        (CHALLENGE,),
        AT_ONCE,
    ),
]  # fmt: skip


# Workers with TLS


def speak_tls(prepare: Callable[[ssl.SSLContext, Victim], None]) -> Attack:
    """Returns an attack by a TLS client that trusts every certificate."""

    def run(victim: Victim) -> Got:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["weft"])
        prepare(context, victim)
        with connected(victim) as connection:
            begun_s = time.monotonic()
            try:
                with context.wrap_socket(connection, suppress_ragged_eofs=False) as wrapped:
                    return read_all(wrapped, begun_s)
            except ssl.SSLError as error:
                return Got((_alert(error),), 0, AT_ONCE)

    return run


def as_tls_member(key: Callable[[Victim], Secret]) -> Attack:
    """Returns an attack by a client with a certificate of the right authority."""

    def run(victim: Victim) -> Got:
        assert victim.tls is not None
        with (
            addresses.dial(victim.address, LIMIT_S) as plain,
            secure_client(plain, victim.tls, LIMIT_S) as connection,
        ):
            return say_hello(connection, key(victim), introduction(victim))[0]

    return run


def downgrade(victim: Victim) -> Got:
    """Greets as a member tricked into believing that the other end has no TLS."""
    with connected(victim) as connection:
        begun_s = time.monotonic()
        text = json.dumps({"worker": victim.other}).encode()
        connection.sendall(frame(Kind.HELLO, b"\0" * (PROOF_BYTES + NONCE_BYTES) + text))
        return read_all(connection, begun_s)


def _old(context: ssl.SSLContext, victim: Victim) -> None:
    assert victim.tls is not None
    context.load_cert_chain(victim.tls.certificate)
    context.maximum_version = ssl.TLSVersion.TLSv1_2


def _of_another_authority(certificate: str) -> Callable[[ssl.SSLContext, Victim], None]:
    return lambda context, victim: context.load_cert_chain(certificate)


def tls_rows(certificate: str) -> list[Row]:
    """Returns the attacks on workers with TLS; ``certificate`` is of another authority."""
    return [
        Row("a greeting without TLS (downgrade)", downgrade, (), AT_ONCE),
        Row("a request of HTTP", send(b"GET / HTTP/1.1\r\n\r\n"), (), AT_ONCE),
        Row("says nothing", send(b""), (), AT_THE_LIMIT),
        Row("half of TLS's first message, then silence", send(CLIENT_HELLO), (), AT_THE_LIMIT),
        Row("TLS 1.2", speak_tls(_old), ("a TLS alert: protocol version",), AT_ONCE),
        Row(
            "TLS without a certificate",
            speak_tls(lambda context, victim: None),
            ("a TLS alert: certificate required",),
            AT_ONCE,
        ),
        Row(
            "TLS with a certificate of another authority",
            speak_tls(_of_another_authority(certificate)),
            ("a TLS alert: unknown ca",),
            AT_ONCE,
        ),
        Row(
            "TLS with a certificate of the group's authority, and another secret",
            as_tls_member(lambda victim: ANOTHER_SECRET.derive(victim.token)),
            (CHALLENGE, REFUSAL),
            AT_ONCE,
        ),
        Row(
            "the same, and the token without the secret",
            as_tls_member(lambda victim: Secret(victim.token.encode())),
            (CHALLENGE, REFUSAL),
            AT_ONCE,
        ),
    ]
