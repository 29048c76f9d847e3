"""The queue between the threads of hosts and the thread that receives."""

from __future__ import annotations

import select
import threading

from torchweft.launch.hosts import _MOST_OUTPUTS, _Events

LIMIT_S = 20.0


def output(number: int) -> dict[str, object]:
    return {"event": "output", "number": number}


def is_readable(events: _Events) -> bool:
    return bool(select.select([events], [], [], 0)[0])


def test_events_come_in_order_and_make_the_descriptor_readable() -> None:
    events = _Events()
    assert not is_readable(events)
    events.put({"event": "started"})
    events.put_output(output(1), lambda: False)
    assert is_readable(events)
    assert [event["event"] for event in events.take()] == ["started", "output"]
    assert not is_readable(events)
    events.wake()
    assert is_readable(events)
    events.close()
    events.wake()


def test_output_waits_for_room_and_other_events_do_not() -> None:
    events = _Events()
    for number in range(_MOST_OUTPUTS):
        events.put_output(output(number), lambda: False)
    waiting = threading.Thread(target=events.put_output, args=(output(-1), lambda: False))
    waiting.start()
    events.put({"event": "ended"})
    taken = list(events.take())
    assert [event.get("number") for event in taken[:_MOST_OUTPUTS]] == list(range(_MOST_OUTPUTS))
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    rest = [*taken[_MOST_OUTPUTS:], *events.take()]
    assert sorted(event["event"] for event in rest) == ["ended", "output"]
    events.close()


def test_output_of_a_host_that_is_ended_is_dropped_where_there_is_no_room() -> None:
    events = _Events()
    for number in range(_MOST_OUTPUTS):
        events.put_output(output(number), lambda: False)
    events.put_output(output(-1), lambda: True)
    assert [event["number"] for event in events.take()] == list(range(_MOST_OUTPUTS))
    events.close()
