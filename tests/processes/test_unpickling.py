"""No data from strangers is unpickled, not even messages that members may send."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from tests.contract.processes import functions
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import load
from tests.processes import unpickling
from tests.thorough import share
from torchweft import rpc
from torchweft.engine.codec.exceptions import pack_error
from torchweft.engine.codec.objects import pack
from torchweft.engine.io import addresses
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, encode_frame
from torchweft.engine.wire.messages import ERROR_REPLY, NO_CREATION, Kind, encode_call, encode_reply
from torchweft.engine.worker.current import current
from torchweft.launch import Cluster

pytestmark = [pytest.mark.keeps("threads", "descriptors"), pytest.mark.timeout(180)]

WORKER = "worker0"
LIMIT_S = 5.0
MUTATED = share(300)
MEMORY_BYTES = 64 << 20
GOODBYE = b"".join(encode_frame(Kind.GOODBYE, 0, 0, b""))


def frame(kind: int, flags: int, control: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(kind, flags, 1, control))


def pickled_call() -> bytes:
    """Returns a call as a member makes it, which would create an object in the worker."""
    payload = pack((object(),), main_by_name=True).payload
    name = f"{functions.__name__}:identity".encode()
    return frame(Kind.CALL, 0, encode_call(10.0, NO_CREATION, 0, 0, name, b"", (), payload))


def error_reply() -> bytes:
    payload = pack_error(ValueError("no"), "stranger")
    return frame(Kind.REPLY, ERROR_REPLY, encode_reply(0, 0, (), payload))


def attempts() -> list[bytes]:
    """Returns what strangers send: every kind of frame, pickles, false greetings, and mixtures."""
    pickles = [pickled_call(), error_reply(), pack(object(), main_by_name=True).payload]
    of_members = load("stream").seeds()
    of_strangers = [seed[1:] for seed in load("greeting").seeds() if seed[0] == 0]
    every_kind = [frame(kind, 0, b"\0" * 24) for kind in Kind]
    whole = [*pickles, *of_members, *of_strangers, *every_kind]
    whole += [greeting + pickles[0] for greeting in of_strangers]
    chance = random.Random(7)
    mutator = Mutator(chance, load("stream"))
    mutated = [mutator.mutate(chance.choice(whole), chance.choice(whole)) for _ in range(MUTATED)]
    return whole + mutated


def send(address: addresses.Address, content: bytes) -> bytes:
    """Sends ``content``, ends the output, and returns the answer up to the worker's hang-up."""
    with addresses.dial(address, LIMIT_S) as connection:
        connection.settimeout(LIMIT_S)
        answer = bytearray()
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                answer += part
        except TimeoutError:
            raise AssertionError(f"still connected after {content[:80]!r}") from None
        except OSError:
            pass  # The worker hung up before it had read everything.
        return bytes(answer)


@pytest.fixture
def watched(group: Cluster) -> Iterator[None]:
    assert rpc.rpc_sync(WORKER, unpickling.watch) > len(unpickling._READERS)
    yield
    rpc.rpc_sync(WORKER, unpickling.unwatch)


def test_nothing_of_a_stranger_is_unpickled(watched: None) -> None:
    before_bytes = rpc.rpc_sync(WORKER, unpickling.largest_bytes)
    listeners = current().find(WORKER).registration.addresses
    assert {address.partition(":")[0] for address in listeners} == {"unix", "tcp"}
    challenged = 0
    for address in map(addresses.parse, listeners):
        for content in attempts():
            answer = send(address, content)
            challenged += answer[:1] == bytes((Kind.CHALLENGE,))
            said = answer[HEADER_BYTES + HEADER.unpack_from(answer)[3] :] if answer else b""
            assert said in (b"", GOODBYE), "a stranger is told more than that it proved nothing"
    assert challenged > MUTATED, "the worker did not even talk to them"
    assert rpc.rpc_sync(WORKER, unpickling.seen) == []
    assert rpc.rpc_sync(WORKER, unpickling.largest_bytes) - before_bytes < MEMORY_BYTES

    # A member's pickle is noticed, so the worker has been watching.
    with pytest.raises(Exception, match="something was unpickled"):
        rpc.rpc_sync(WORKER, functions.identity, args=(object(),))
    assert len(rpc.rpc_sync(WORKER, unpickling.seen)) == 1


def test_every_kind_of_frame_is_tried() -> None:
    tried = {content[0] for content in attempts() if len(content) >= HEADER_BYTES}
    assert tried >= set(map(int, Kind))
