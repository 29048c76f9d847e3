"""The file of a trace keeps to the rules of Perfetto, and holds what was recorded."""

from __future__ import annotations

import json
import os
import random
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
from tests.trace_reader import Found, ns, read_trace
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ObserveError
from torchweft.observe.text import plain
from torchweft.observe.tracing import chrome
from torchweft.observe.tracing.chrome import Traced
from torchweft.observe.tracing.notes import OFFERED, RAN
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


def test_the_times_of_a_worker_are_moved_to_the_clock_of_the_leader(path: Path) -> None:
    caller, callee = step()
    ahead = [
        each._replace(began_s=each.began_s - 3.0, ended_s=each.ended_s - 3.0)
        for each in callee.slices
    ]
    found = written([caller, callee._replace(slices=ahead, alignment=alignment(-3.0, 0.0))], path)
    (run,) = found.of("run")
    assert (run["ts"], run["dur"]) == pytest.approx((1_030_000, 40_000))


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
