"""A member of an open group that poses as made-up workers, which send a worker arbitrary data."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

from tests.fuzz.json_mutating import change_json
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import load
from tests.processes import unpickling
from torchweft import rpc
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Greeting, Handshake
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.connecting import CAPABILITIES, REGISTRATION, VERDICT
from torchweft.engine.worker.current import current

LIMIT_S = 10.0
_FIRST_ID = 1000
_SHOWN_LENGTH = 1500
_ids = itertools.count(_FIRST_ID)
_PURPOSES = ("data", "introduction", "resume", "probe")


class Hung(AssertionError):
    """The victim kept a connection open that had nothing more to carry."""


class _Surprises(logging.Handler):
    """Keeps the log records of errors that Weft did not foresee."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # Failures that a stranger reports and the program ignores are foreseen.
        if record.exc_info and record.funcName != "_log_unseen":
            self.texts.append(logging.Formatter().format(record)[-_SHOWN_LENGTH:])


_surprises = _Surprises()


def join(name: str, rank: int, method: str) -> None:
    logging.getLogger("torchweft").addHandler(_surprises)
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=LIMIT_S, rpc_timeout=LIMIT_S)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


def send_frames(to: str, seed: int, count: int) -> dict[str, int]:
    """Lets ``count`` unknown workers join, each with frames that no worker sends."""
    chance = random.Random(seed)
    target = load("stream")
    mutator, seeds = Mutator(chance, target), target.seeds()
    seeds += [b"".join(encode_frame(kind, 0, 0, b"")) for kind in Kind]
    outcomes = []
    for kind in itertools.islice(itertools.cycle(("unix", "tcp")), count):
        frames = [mutator.mutate(chance.choice(seeds), chance.choice(seeds)) for _ in range(4)]
        outcomes.append(_greet(to, kind, _greeting(to, kind), b"".join(frames)))
    return _count(outcomes)


def send_greetings(to: str, seed: int, count: int) -> dict[str, int]:
    """Lets ``count`` unknown workers send greetings with nonsensical facts."""
    chance = random.Random(seed)
    outcomes = []
    for kind in itertools.islice(itertools.cycle(("unix", "tcp")), count):
        greeting = _greeting(to, kind)
        if chance.random() < 0.6:
            greeting.facts["purpose"] = chance.choice(_PURPOSES)
            greeting.facts["position"] = chance.choice((0, 7, -1, 1 << 70))
        text = json.dumps(asdict(greeting)).encode()
        for _ in range(chance.randrange(3)):
            text = change_json(chance, text) or text
        with contextlib.suppress(TypeError):
            outcomes.append(_greet(to, kind, Greeting(**json.loads(text)), b""))
    return _count(outcomes)


def how_it_is() -> dict[str, Any]:
    """Returns this worker's name, threads, peak memory and unforeseen errors."""
    return {
        "name": rpc.get_worker_info().name,
        "threads": threading.active_count(),
        "largest_bytes": unpickling.largest_bytes(),
        "surprises": _surprises.texts,
    }


def ask(to: str) -> dict[str, Any]:
    return rpc.rpc_sync(to, how_it_is, timeout=LIMIT_S)


def _greeting(to: str, kind: str) -> Greeting:
    """Returns the greeting of a new worker."""
    number = next(_ids)
    agent = current()
    me = Registration(f"fake{number}", number, ("unix:@nobody",), facts={})
    facts = {
        CAPABILITIES: agent.channels.describe(),
        "to": agent.find(to).id,
        REGISTRATION: me.as_json(),
    }
    if kind == "tcp":
        facts |= {"session": f"session{number}", "attempt": 1}
    return Greeting(number, facts=facts)


def _greet(to: str, kind: str, greeting: Greeting, content: bytes) -> str:
    """Greets, then sends ``content``; returns the outcome: welcome, refused or dropped."""
    agent = current()
    (listener,) = [each for each in agent.find(to).registration.addresses if each.startswith(kind)]
    descriptors: list[int] = []
    with addresses.dial(addresses.parse(listener), LIMIT_S) as connection:
        key, deadline_s = agent._connector.key, time.monotonic() + LIMIT_S
        handshake = Handshake.dial(connection, key, deadline_s)
        try:
            handshake.send(Kind.HELLO, greeting)
            welcome = handshake.receive(Kind.WELCOME, descriptors)
        except TimeoutError:
            raise Hung(f"no answer to {greeting}") from None
        except OSError:
            return "dropped"
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not welcome.refusal:
            if kind == "unix" and greeting.facts.get("purpose") in (None, "link"):
                with contextlib.suppress(OSError):
                    handshake.send(Kind.VERDICT, Greeting(greeting.worker, facts={VERDICT: {}}))
            _send_and_end(connection, content)
        return "refused" if welcome.refusal else "welcome"


def _send_and_end(connection: socket.socket, content: bytes) -> None:
    """Sends ``content`` and ends the stream; raises unless the other side then hangs up."""
    connection.settimeout(LIMIT_S)
    try:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        raise Hung(f"still connected after {content[:200]!r}") from None
    except OSError:
        pass  # The other side hung up before it had read all.


def _count(outcomes: list[str]) -> dict[str, int]:
    counts = {"welcome": 0, "refused": 0, "dropped": 0}
    for outcome in outcomes:
        counts[outcome] += 1
    return counts
