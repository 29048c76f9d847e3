"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import sys

import pytest

from tests.contract.processes.test_messages import Slow, divide, files_in, printed
from torchweft import knobs, rpc
from torchweft.engine.codec.tracebacks import places_of
from torchweft.errors import UnknownFunction
from torchweft.launch import Cluster

pytestmark = [
    pytest.mark.keeps("threads", "descriptors"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes"),
]


def test_all_frames_are_there_for_whoever_asks(group: Cluster) -> None:
    with knobs.TRACEBACKS.override("full"):
        text = printed(lambda: rpc.rpc_sync("driver", divide, args=(0,)))
    assert {file.rpartition("/")[2] for file in files_in(text) if "/torchweft/" in file} >= {
        "calls.py",
        "serving.py",
    }


def test_programs_can_read_where_an_error_was_raised(group: Cluster) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        rpc.rpc_sync("worker1", divide, args=(0,))
    (place,) = places_of(caught.value)
    assert place.splitlines()[0] == 'On worker "worker1":'


def test_what_a_property_lacks_is_no_missing_method(group: Cluster) -> None:
    reference = rpc.remote("worker1", Slow)
    with pytest.raises(AttributeError, match="nothing_of_that_name") as caught:
        reference.rpc_sync().broken()
    assert not isinstance(caught.value, UnknownFunction)
    assert "in broken" in places_of(caught.value)[0]
