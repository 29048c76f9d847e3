"""The file of a trace keeps to the rules of Perfetto, and holds what was recorded."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_up_traces import (
    CONTEXT,
    MAIN,
    SERVING,
    alignment,
    call,
    received,
    sent,
    step,
    worker,
)
from tests.trace_reader import Event, Found, ns, read_events, read_trace
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ObserveError
from torchweft.observe.text import plain
from torchweft.observe.tracing import chrome
from torchweft.observe.tracing.chrome import Traced
from torchweft.observe.tracing.notes import CREATED, OFFERED, RAN, SERVED
from torchweft.observe.tracing.reading import STEP, graph_of, load, summary

ABOUT = {
    "clock_error_us": 3.0,
    "missing": {"other": "it joined after the begin of the trace"},
    "workers": [
        {"name": "trainer", "host": "here", "dropped": 0},
        {"name": "server", "host": "here", "dropped": 4},
    ],
}


def written(traced: list[Traced], path: Path, began_s: float = 0.0) -> Found:
    with path.open("w") as file:
        chrome.write(file, traced, ABOUT, began_s)
    return read_trace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.json"


def test_a_call_is_a_chain_of_slices_and_arrows(path: Path) -> None:
    found = written(step(), path)
    assert found.processes == {1: "trainer on here", 2: "server on here"}
    assert found.tracks[1, MAIN] == f"thread {MAIN}"
    (made,), (run,), (answer,) = found.of("call"), found.of("run"), found.of("answer")
    assert (made["ts"], made["dur"], made["name"]) == (1_000_000, 100_000, "call model.forward")
    assert (run["ts"], run["dur"]) == (1_030_000, 40_000)
    assert run["args"]["queued_us"] == 10_000
    assert (answer["ts"], answer["dur"]) == (1_070_000, 12_000)
    assert [each["dur"] for each in found.of("queue")] == [10_000]
    chains = [[each["cat"] for each in flow] for flow in found.flows.values()]
    assert sorted(chains, key=len) == [
        ["send", "receive"],
        ["send", "receive"],
        ["send", "receive", "run"],
    ]
    (gradients,) = [f for f in found.flows.values() if f[0]["name"] == "send gradients"]
    assert [found.worker_of(each) for each in gradients] == ["trainer", "server"]
    (backward,) = found.of("backward")
    assert backward["args"]["operations"] == {"MulBackward0": 2, "SumBackward0": 1}


def test_no_time_is_negative_where_a_worker_recorded_before_the_begin(path: Path) -> None:
    found = written(step(), path, 1.5)
    (made,) = found.of("call")
    assert (made["ts"], made["dur"]) == (0, 100_000)
    assert min(each["ts"] for each in found.slices) == 0


def test_the_times_of_a_worker_are_moved_to_the_clock_of_the_leader(path: Path) -> None:
    caller, callee = step()
    ahead = [
        each._replace(began_s=each.began_s - 3.0, ended_s=each.ended_s - 3.0)
        for each in callee.slices
    ]
    found = written([caller, callee._replace(slices=ahead, alignment=alignment(-3.0, 0.0))], path)
    (run,) = found.of("run")
    assert (run["ts"], run["dur"]) == pytest.approx((1_030_000, 40_000))


def test_a_value_that_a_worker_makes_on_itself_has_an_arrow_forwards(path: Path) -> None:
    """Its function may run before the thread that has asked for it goes on."""
    served = (SERVED, 0.9, 0.91, 0.95, SERVING, SERVING, 0, 0, 3, "torch.ones", 0, False)
    rows = [served, (CREATED, 1.0, MAIN, 0, 3, "torch.ones")]
    found = written([worker(0, rows), worker(1, [])], path)
    (flow,) = found.flows.values()
    assert [each["cat"] for each in flow] == ["create", "run"]


def test_a_call_with_a_future_is_on_a_track_of_its_own(path: Path) -> None:
    caller, callee = call(is_async=True)
    found = written([worker(0, caller), worker(1, callee)], path)
    (made,) = found.of("call")
    assert made["ph"] == "b"


def test_a_coroutine_is_on_a_track_of_its_own_and_its_arrow_ends_in_the_thread(path: Path) -> None:
    caller, callee = call(ended_in=MAIN)
    found = written([worker(0, caller), worker(1, callee)], path)
    (run,) = found.of("run")
    assert run["ph"] == "b"
    chains = [[each["cat"] for each in flow] for flow in found.flows.values()]
    assert ["send", "receive", "mark"] in chains


def test_what_one_side_lacks_is_missing_and_its_arrow(path: Path) -> None:
    caller, callee = call()
    found = written([worker(0, caller), worker(1, callee[:1])], path)
    assert [[each["cat"] for each in flow] for flow in found.flows.values()] == [
        ["send", "receive"]
    ]
    assert (len(found.of("call")), len(found.of("run"))) == (1, 0)
    found = written([worker(1, callee)], path)
    assert [each["args"]["from"] for each in found.of("run")] == ["trainer"]
    assert [[each["cat"] for each in flow] for flow in found.flows.values()] == [["receive", "run"]]


def test_calls_of_the_trace_itself_are_left_out(path: Path) -> None:
    caller, callee = call(number=900)
    assert written([worker(0, caller), worker(1, callee)], path).slices == []
    service = "torchweft.observe.tracing.recorder.begin"
    caller, callee = call()
    for rows in (caller, callee):
        rows[:] = [tuple(service if e == "model.forward" else e for e in row) for row in rows]
    assert written([worker(0, caller), worker(1, callee)], path).slices == []


def test_messages_of_one_kind_and_number_keep_their_order(path: Path) -> None:
    posts = [sent(1, Kind.POST, 4, at_s, more) for at_s, more in ((1.0, 50), (2.0, 60))]
    taken = [received(0, Kind.POST, 4, at_s, more) for at_s, more in ((1.5, 50), (2.5, 60))]
    found = written([worker(0, posts), worker(1, taken)], path)
    ends = [[each["ts"] for each in flow] for flow in found.flows.values()]
    assert ends == [[1_000_000, 1_500_000], [2_000_000, 2_500_000]]


def test_a_message_from_before_the_trace_is_not_taken_for_a_later_one(path: Path) -> None:
    taken = [received(0, Kind.POST, 4, 1.0, 70), received(0, Kind.POST, 4, 2.5, 50)]
    found = written([worker(0, [sent(1, Kind.POST, 4, 2.0, 50)]), worker(1, taken)], path)
    ends = [[each["ts"] for each in flow] for flow in found.flows.values()]
    assert ends == [[2_000_000, 2_500_000]]


def test_tensors_beside_a_message_are_part_of_it(path: Path) -> None:
    caller, callee = call()
    offered = (OFFERED, 1, "call", 5, (("shm", 4096),))
    found = written([worker(0, [offered, *caller]), worker(1, callee)], path)
    (request,) = [each for each in found.of("send") if each["args"]["kind"] == "call"]
    assert request["args"]["tensors"] == {"inline": 40, "shm": 4096}


@pytest.mark.parametrize("seed", range(20))
def test_any_work_of_threads_nests(seed: int, path: Path) -> None:
    made_up = random.Random(seed)
    rows = []
    for number in range(40):
        # Some times are equal, and some differ by nanoseconds.
        began_s = made_up.randrange(100) / 10 + made_up.randrange(4) * 1e-9
        ended_s = began_s + made_up.randrange(30) / 10 + made_up.randrange(4) * 1e-9
        thread = made_up.choice((MAIN, SERVING, 33))
        rows.append((RAN, began_s, ended_s, thread, STEP, f"step {number}", 0, ()))
    found = written([worker(0, rows), worker(1, [])], path)
    assert len(found.of(STEP)) == len(rows)


def test_times_are_exact_in_an_importer_that_cuts_nanoseconds_off() -> None:
    made_up = random.Random(1)
    times = [*range(5000), *[made_up.randrange(10**12) for _ in range(5000)]]
    assert [ns(chrome._us(each)) for each in times] == times
    assert [ns(round(each / 1000, 3)) for each in times] != times


Break = Callable[[list[Event]], object]


def one(events: list[Event], **fields: object) -> Event:
    """Returns the first event with these fields."""
    return next(each for each in events if fields.items() <= each.items())


BREAKS: dict[str, Break] = {
    "a field is missing": lambda events: one(events, ph="X").pop("dur"),
    "a field is unknown": lambda events: one(events, ph="X").update(color="red"),
    "a process has no name": lambda events: events.remove(one(events, name="process_name")),
    "a track has no name": lambda events: events.remove(one(events, name="thread_name")),
    "a track has two names": lambda events: events.append(one(events, name="thread_name")),
    "a name is for no track": lambda events: one(events, name="thread_name").update(tid=77),
    "a thread has 33 bits": lambda events: one(events, ph="X").update(tid=1 << 32),
    "a time is a text": lambda events: one(events, ph="X").update(ts="1"),
    "a time is before the begin": lambda events: one(events, ph="X").update(ts=-1.0),
    "a slice takes less than no time": lambda events: one(events, ph="X").update(dur=-0.001),
    "events are not in order": lambda events: events.append(one(events, ph="X")),
    "an end has another name": lambda events: one(events, ph="e").update(name="other"),
    "an end is missing": lambda events: events.remove(one(events, ph="e")),
    "a begin is missing": lambda events: events.remove(one(events, ph="b")),
    "an id is there twice": lambda events: events.extend(
        [one(events, ph="b") | {"pid": 2, "ts": 9e9}, one(events, ph="e") | {"pid": 2, "ts": 9e9}]
    ),
    "an arrow does not end": lambda events: one(
        events, ph="X", flow_in=True, flow_out=False
    ).update(bind_id=99),
    "an arrow begins twice": lambda events: one(
        events, ph="X", flow_in=True, flow_out=False
    ).update(flow_in=False, flow_out=True),
    "an arrow leads backwards": lambda events: [
        each.update(flow_in=each["flow_out"], flow_out=each["flow_in"])
        for each in events
        if "bind_id" in each
    ],
    "a slice ends two nanoseconds late": lambda events: events.extend(
        one(events, ph="X") | {"ts": 9e9, "dur": dur} for dur in (1.0, 1.002)
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_reader_of_these_tests_sees_each_broken_rule(name: str, path: Path) -> None:
    written(step(), path)
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    read_events(json.loads(json.dumps(events)), {})
    BREAKS[name](events)
    with pytest.raises((AssertionError, KeyError)):
        read_events(json.loads(json.dumps(events)), {})


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}'])
def test_the_reader_of_these_tests_refuses_what_is_no_json(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(AssertionError):
        read_trace(path)


# What is read from the file


def test_the_summary_names_functions_channels_and_what_is_missing(path: Path) -> None:
    written(step(), path)
    text = plain(summary(load(path)))
    assert text.startswith("2 workers, 1.0 s, clocks within 3.0 us")
    assert "model.forward" in text
    assert "backward MulBackward0" in text
    assert "of them tensors, inline" in text
    assert "nothing of other: it joined after the begin of the trace" in text
    assert "server had no room for 4 records" in text


def test_the_graph_has_messages_bytes_and_times(path: Path) -> None:
    written(step(), path)
    graph = graph_of(load(path), CONTEXT)
    assert graph.workers == ("trainer", "server")
    told = [(each.direction, each.sender) for each in graph.edges]
    assert told == [("forward", "trainer"), ("forward", "server"), ("backward", "trainer")]
    assert all(each.channels == {"inline": 40} for each in graph.edges)
    assert [each.taken_s for each in graph.edges] == pytest.approx([0.02, 0.02, 0.02])
    (part,) = graph.parts
    assert (part.worker, part.runs, part.taken_s) == ("server", 1, pytest.approx(0.02))
    text = graph.text()
    size_bytes = sum(each.size_bytes for each in graph.edges)
    assert f"context 77: 2 workers, 3 messages, {size_bytes} B" in text
    assert "backward  on server: 20 ms in 1 part: MulBackward0 x 2, SumBackward0" in text


def test_a_context_that_is_not_in_the_trace_is_named_with_those_that_are(path: Path) -> None:
    written(step(), path)
    with pytest.raises(ObserveError, match="no message of autograd context 4; it has those of 77"):
        graph_of(load(path), 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is no JSON"),
        ("[]", "no trace of Weft"),
        ('{"traceEvents": []}', "no trace of Weft"),
        ('{"weft": {"format": 99}}', "has format 99"),
        ('{"weft": {"format": 1}}', "is damaged"),
    ],
)
def test_another_file_is_refused(content: str, said: str, path: Path) -> None:
    path.write_text(content)
    with pytest.raises(ObserveError, match=said):
        load(path)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ObserveError, match="cannot be read: No such file"):
        load(path)


def test_the_events_are_written_one_a_line() -> None:
    file = io.StringIO()
    chrome.write(file, step(), ABOUT, 0.0)
    head, *lines, _ = file.getvalue().splitlines()
    assert head.endswith('"traceEvents": [')
    assert all(json.loads(line.rstrip(",")) for line in lines if line != "]}")


def test_hostile_files_are_refused_in_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    os.mkfifo(path)
    with pytest.raises(ObserveError, match="cannot be read: Is no plain file"):
        load(path)
    path.unlink()
    written(step(), path)
    good = path.read_text()
    for text in (
        "[" * 1_000_000,
        "9" * 100_000,
        good.replace('"ts":', '"ts":"x","x":'),
        good.replace('"traceEvents": [', '"traceEvents": [3, '),
        good.replace('"workers": [', '"workers": 3, "x": ['),
        good.replace('"dropped"', '"x"'),
        good.replace('"clock_error_us": ', '"clock_error_us": "y", "x": '),
    ):
        path.write_text(text)
        with pytest.raises(ObserveError, match=r"is no trace|is damaged"):
            plain(summary(load(path)))


def test_what_a_file_says_does_not_control_the_terminal(path: Path) -> None:
    written(step(), path)
    hostile = json.dumps("\x1b]0;owned\x07\x9b31m")[1:-1]
    path.write_text(path.read_text().replace("forward", hostile).replace("trainer", hostile))
    text = plain(summary(load(path)))
    assert r"\x1b]0;owned\x07\x9b31m" in text
    assert "\x1b" not in text
    assert "\x9b" not in text
