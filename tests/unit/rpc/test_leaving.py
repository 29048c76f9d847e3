"""How a worker leaves its group, and how the connections of its peers behave meanwhile."""

from __future__ import annotations

import contextlib
import time

from torch.distributed import HashStore

from tests.unit.engine.worker.group import Member, group_of, wait_until
from torchweft.engine.protocol.connecting import Patience
from torchweft.engine.protocol.leaving import Left, Send, Step
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import current as current_agent
from torchweft.rpc.node import Node
from torchweft.rpc.options import RpcBackendOptions

LONG_S = 30.0
CLOSE_LIMIT_S = 5.0


def _fall_silent(member: Member) -> None:
    """Makes a member answer nothing, while its host still accepts connections."""
    member.agent.reactor.forget(member.listener.fileno())
    member.agent.links.end(member.agent.links.all()[0])


def test_no_time_is_spent_on_a_lost_worker_whose_session_is_broken() -> None:
    patience = Patience(LONG_S, LONG_S)
    with (
        group_of(2, over="tcp", patience=patience) as (first, second),
        contextlib.ExitStack() as ending,
    ):
        ending.callback(current_agent.install, None)
        node = Node(first.agent, RpcBackendOptions(secret=None), HashStore())
        node.start()
        second.start()
        peer = first.peer(second)
        first.agent.connect(peer)
        wait_until(lambda: second.peer(first).link, "the session")
        _fall_silent(second)
        wait_until(lambda: first.session(second).is_broken, "the break")
        first.agent.sender.post(peer, encode_frame(Kind.RELEASE_MESSAGES, 0, 0, bytes(200)))
        assert peer.lost is None

        node.leaving._act(Left((peer.id,)))
        began_s = time.monotonic()
        node.end(CLOSE_LIMIT_S)
        assert time.monotonic() - began_s < 1.9  # An attempt to connect again takes two seconds.
        assert peer.lost is not None
        assert peer.lost.cause == "rank 0 says so"


def test_rank_0_tells_why_a_worker_is_lost() -> None:
    with group_of(3) as (first, second, third), contextlib.ExitStack() as ending:
        ending.callback(current_agent.install, None)
        nodes = []
        for member in (first, second):
            nodes.append(Node(member.agent, RpcBackendOptions(secret=None), HashStore()))
            nodes[-1].start()
        first.agent.leave_behind(first.peer(third), "its program raised ValueError: boom")

        nodes[0].leaving._act(Send(second.agent.me.id, Step.CLOSE, (third.agent.me.id,)))
        told = second.peer(third)
        wait_until(lambda: told.lost, "the end of the group")
        assert told.lost is not None
        assert told.lost.cause == "rank 0 says: its program raised ValueError: boom"
        for node in nodes:
            node.end(CLOSE_LIMIT_S)
