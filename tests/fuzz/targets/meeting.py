"""Requests to the launcher's store: each one is answered, and the launcher keeps running."""

from __future__ import annotations

import json

from tests.fuzz.target import Target
from torchweft.launch.meeting import StoreServer

_SEPARATOR = b"\n"


def run(data: bytes) -> Exception | None:
    """Sends one request per line to a new store; counts as refused if the last one was."""
    server = StoreServer()
    answer: dict[str, object] = {}
    try:
        for request in data.split(_SEPARATOR):
            answer = json.loads(server._answer(request))
            assert len(answer) == 1
    finally:
        server.close()
    return ValueError(answer["problem"]) if "problem" in answer else None


def seeds() -> list[bytes]:
    """Returns every request, alone and one after the other."""
    requests = [
        ["set", "key", "text"],
        ["get", "key"],
        ["add", "count", 2],
        ["compare_set", "key", "text", "other"],
        ["check", ["key", "count"]],
    ]
    lines = [json.dumps(request).encode() for request in requests]
    numbers = [b'["set", "key", 1e999]', b'["add", "key", 1]']
    return [*lines, _SEPARATOR.join(lines), _SEPARATOR.join(numbers), b"[" * 2000]


_WORDS = (b'"set"', b'"get"', b'"add"', b'"compare_set"', b'"check"', b'"key"', b"1e999", b"NaN")
_WORDS += (b"[]", b"{}", b"null", b"-1", b'"\\ud800"', b'["set", "key", 1e999]\n', b"[" * 1500)
TARGET = Target("meeting", run, seeds, words=_WORDS, length_limit=2048, json_from=0)
