"""Both ends of messages and calls are found, as far as they were recorded."""

from __future__ import annotations

import pytest

from tests.made_up_traces import CONTEXT, alignment, call, received, sent, step, worker
from torchweft.engine.wire.messages import Kind
from torchweft.observe.tracing.joining import Call, join
from torchweft.observe.tracing.records import SAME, Created, Offered, Served, read


def only_call(joined: object) -> Call:
    (found,) = joined.calls  # type: ignore[attr-defined]
    assert isinstance(found, Call)
    return found


def test_a_call_has_both_sides_and_both_messages_at_one_time() -> None:
    joined = step(ahead_s=5.0)
    found = only_call(joined)
    assert (found.key, found.function, found.context_id) == ("0.5", "model.forward", CONTEXT)
    assert found.made is not None
    assert found.served is not None
    assert found.request is not None
    assert found.answer is not None
    assert found.served.arrived_s == pytest.approx(1.02)
    assert found.request.received is not None
    assert found.request.received.at_s == pytest.approx(1.02)
    assert found.answer.at_s == pytest.approx(1.08)
    assert found.request.channels == {"inline": 40}
    assert [each.name for each in joined.messages] == ["call", "reply", "gradients"]
    assert all(each.sent and each.received for each in joined.messages)


def test_what_one_side_lacks_is_missing_and_nothing_else() -> None:
    caller, callee = call()
    joined = join([(worker(0, caller), SAME), (worker(1, [callee[0]]), SAME)])
    found = only_call(joined)
    assert (found.made is None, found.served is None) == (False, True)
    assert found.answer is not None
    assert found.answer.sent is None
    joined = join([(worker(1, callee), SAME)])
    found = only_call(joined)
    assert (found.made is None, found.served is None) == (True, False)
    assert joined.name_of(0) == "trainer"
    assert joined.name_of(9) == "worker 9"


def test_calls_of_the_trace_itself_are_left_out() -> None:
    caller, callee = call(number=900)
    joined = join([(worker(0, caller), SAME), (worker(1, callee), SAME)])
    assert (joined.calls, joined.messages) == ([], [])
    assert len(joined.omitted) == 2


def test_messages_of_one_kind_and_number_keep_their_order() -> None:
    posts = [sent(1, Kind.POST, 4, at_s, size) for at_s, size in ((1.0, 50), (2.0, 60))]
    taken = [received(0, Kind.POST, 4, at_s, size) for at_s, size in ((1.5, 50), (2.5, 60))]
    joined = join([(worker(0, posts), SAME), (worker(1, taken), SAME)])
    ends = [(each.sent and each.sent.began_s, each.received) for each in joined.messages]
    assert ends == [(1.0, taken[0]), (2.0, taken[1])]


def test_a_message_from_before_the_trace_is_not_taken_for_a_later_one() -> None:
    taken = [received(0, Kind.POST, 4, 1.0, 70), received(0, Kind.POST, 4, 2.5, 50)]
    joined = join([(worker(0, [sent(1, Kind.POST, 4, 2.0, 50)]), SAME), (worker(1, taken), SAME)])
    assert [(each.sent is None, each.size_bytes) for each in joined.messages] == [
        (True, 70),
        (False, 50),
    ]


def test_a_value_that_is_made_is_found_by_its_reference() -> None:
    made = Created(1.1, 11, 1, 7, "model.make")
    request = sent(1, Kind.CALL, 0, 1.0, creation=7)
    served = Served(1.2, 1.3, 1.4, 1.5, 22, 22, 0, 0, 7, "model.make", 0, False)
    arrived = received(0, Kind.CALL, 0, 1.2, creation=7)
    joined = join([(worker(0, [request, made]), SAME), (worker(1, [arrived, served]), SAME)])
    found = only_call(joined)
    assert found.key == "0.1.7"
    assert (found.created, found.served) == (made, served)
    assert found.request is not None
    assert found.request.received == arrived


def test_tensors_beside_a_message_are_part_of_it() -> None:
    caller, callee = call()
    offered = Offered(0.99, 11, 1, int(Kind.CALL), 5, (("shm", 4096),))
    joined = join([(worker(0, [offered, *caller]), SAME), (worker(1, callee), SAME)])
    request = only_call(joined).request
    assert request is not None
    assert request.channels == {"inline": 40, "shm": 4096}


def test_rows_get_names_in_the_order_of_their_numbers() -> None:
    late = (8, 1, 2.0, 11, 1, 7, "b")
    early = [3, 1, 1.0, 11, 1, 6, "a"]
    assert read([late, tuple(early)]) == [
        Created(1.0, 11, 1, 6, "a"),
        Created(2.0, 11, 1, 7, "b"),
    ]


def test_an_alignment_moves_all_times_of_a_worker() -> None:
    _, callee = call(ahead_s=-3.0)
    joined = join([(worker(1, callee, -3.0), alignment(-3.0, 0.0))])
    assert joined.workers[1].began_s == pytest.approx(0.0)
    served = only_call(joined).served
    assert served is not None
    assert served.ended_s == pytest.approx(1.07)
