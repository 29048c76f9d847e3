from __future__ import annotations

import os
import socket

from tests.unit.engine.channels.processes import dead_pid, forked
from torchweft.engine.channels.shm import Process, peer_of, process


def test_a_process_is_dead_once_it_has_ended_even_if_nobody_has_waited_for_it() -> None:
    with forked(lambda link: link.recv(1)) as (pid, link):
        other = process(pid)
        assert not other.is_dead()
        link.send(b"!")
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert other.is_dead()
    assert other.is_dead()


def test_an_id_that_was_used_again_is_another_process() -> None:
    me = process(os.getpid())
    assert not me.is_dead()
    assert Process(me.pid, "an earlier time").is_dead()


def test_what_cannot_be_seen_is_not_known_to_be_dead() -> None:
    assert process(0) == (0, "")
    assert not process(0).is_dead()
    assert process(dead_pid()).pid == 0


def test_a_socket_knows_its_peer() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert peer_of(here) == process(os.getpid())
