"""Registrations and directories: accepted ones have the right types throughout."""

from __future__ import annotations

from tests.fuzz.target import Target
from torchweft.engine.protocol.registration import (
    Devices,
    Directory,
    Registration,
    assemble,
    check_devices,
    check_versions,
    differences,
    why_apart,
    why_not_by_value,
)
from torchweft.engine.worker.peers import maps_between
from torchweft.errors import ConfigurationError, ProtocolError, RendezvousTimeout, WeftError

_WORDS_OF_JSON = (
    b'"name" "id" "addresses" "main" "facts" "later_rank" "token" "workers" "refusal" "missing" '
    b'"kind" null true false [] {} "" 0 -1 1e999 NaN [[ ]] {"a": "\\ud800" '
    b'"DuplicateName" "devices" "maps" "listed" "count" "cpu" "cuda:0" "cuda:999" "here" "w" '
    b'99999999999999999999 "network" "versions" "Python" "torch" "Weft" "is_far" "host"'
)
WORDS = (b": ", b", ", *_WORDS_OF_JSON.split())


SAID_LIMIT = 1200
FACTS = {
    "host": "h",
    "network": "n",
    "is_far": False,
    "has_secret": True,
    "versions": {"Python": "3.11", "torch": "2.13.0+cpu", "Weft": "0.1.0"},
    "refuses_versions": True,
}


def assert_sound(registration: Registration) -> None:
    """Asserts that every field has the type that the rest of Weft counts on."""
    assert type(registration.name) is str
    assert type(registration.id) is int
    assert type(registration.addresses) is tuple
    assert all(type(address) is str for address in registration.addresses)
    assert type(registration.main) is str
    assert type(registration.facts) is dict
    assert registration.later_rank is None or type(registration.later_rank) is int
    maps_between(Registration("here", 0, ()), registration)


def _read_registration(data: bytes) -> None:
    registration = Registration.decode(data)
    assert_sound(registration)
    encoded = registration.encode()
    assert Registration.decode(encoded).encode() == encoded
    say_what_differs(registration)


def say_what_differs(told: Registration) -> None:
    """Compares a worker with another worker's registration; the resulting texts are bounded."""
    here = Registration("here", 0, (), facts=FACTS)
    for text in (why_apart([here, told]), differences(here, told), why_not_by_value(here, told)):
        assert len(text) < SAID_LIMIT + 2 * len(told.name)
    said = ""
    try:
        check_versions([here, told])
    except ConfigurationError as error:
        said = str(error)
    assert len(said) < SAID_LIMIT + 2 * len(told.name)
    said = ""
    try:
        check_devices({"here": here.devices, told.name: told.devices}, is_open=False)
    except ConfigurationError as error:
        said = str(error)
    assert len(said) < SAID_LIMIT + 40 * (len(told.name) + sum(map(len, told.devices.maps)))


def _read_directory(data: bytes) -> None:
    directory = Directory.decode(data)
    assert type(directory.token) is str
    assert type(directory.refusal) is str
    assert isinstance(directory.error(0.0), WeftError)
    assert all(type(rank) is int for rank in directory.missing)
    for registration in directory.workers:
        assert_sound(registration)
    encoded = directory.encode()
    assert Directory.decode(encoded).encode() == encoded


def run(data: bytes) -> Exception | None:
    """Reads a directory or a registration, as the first byte selects."""
    if not data:
        return None
    try:
        (_read_directory if data[0] & 1 else _read_registration)(data[1:])
    except ProtocolError as error:
        return error
    return None


def registration(rank: int) -> Registration:
    """Returns the registration of a worker."""
    return Registration(f"worker{rank}", rank, ("unix:@x", "tcp:h:1"), "train", {"host": "h"})


def seeds() -> list[bytes]:
    """Returns registrations, a directory, and refusals."""
    two = {0: registration(0), 1: registration(1)}
    telling = Registration("w", 1, (), facts={**FACTS, "network": "m"})
    maps = {"here": {"cuda:0": "cuda:1", "cpu": "cpu"}, "w": {"cuda:1": "cuda:0"}}
    mapping = Registration("w", 1, (), facts=Devices(maps, ("cuda:0", "cuda:1"), 2).as_facts())
    again = Registration("w", 1 << 14, (), later_rank=3)
    return [
        b"\0" + registration(0).encode(),
        b"\0" + telling.encode(),
        b"\0" + mapping.encode(),
        b"\0" + again.encode(),
        b"\1" + assemble(two, 2, "token", 0.5).encode(),
        b"\1" + Directory.refused(RendezvousTimeout("late", (2,))).encode(),
        b"\1" + Directory("", (), refusal="no").encode(),
    ]


TARGET = Target("membership", run, seeds, words=WORDS, json_from=1)
