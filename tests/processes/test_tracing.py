"""Traces of real workers hold every call, arrow and byte that the counters hold."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.functions import options, wait_until
from tests.processes.telemetry import count_calls, stop_counting
from tests.trace_reader import Found, read_trace
from torchweft import mapreduce, rpc
from torchweft.autograd import backward, context
from torchweft.engine.worker.current import current
from torchweft.errors import ConfigurationError, ObserveError
from torchweft.launch import Cluster, Nursery
from torchweft.nn import RemoteModule
from torchweft.observe.tracing import chrome, recorder, session
from torchweft.observe.tracing.notes import RECEIVED, SENT, TracingWatcher
from torchweft.observe.tracing.recorder import RECORDER
from torchweft.observe.tracing.session import Trace
from torchweft.optim import DistributedOptimizer
from torchweft.rpc.node import current_node

pytestmark = pytest.mark.keeps("threads")
"""The shared driver may start a thread in any test: the plain twin reads by its own threads."""

LIMIT_S = 50.0
SERVICE = "torchweft.observe.tracing.recorder."


def double(value: Any) -> Any:
    return value * 2


def onwards(value: Any) -> Any:
    return rpc.rpc_sync("worker1", double, args=(value,))


async def later(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("on purpose")


def counted() -> dict[tuple[str, str], int]:
    """Returns how often each function was called, by the counters of this worker."""
    counts: Counter[tuple[str, str]] = Counter()
    for each in current_node().reporter.counting.counts():
        if not each.function.startswith(SERVICE):
            counts[each.function, each.direction] += each.calls
    return dict(counts)


def moved() -> dict[str, int]:
    """Returns the bytes of tensors that this worker has moved beside connections."""
    sums: Counter[str] = Counter()
    for peer in list(current().peers.values()):
        sums.update(peer.moved)
    return {name: count for name, count in sums.items() if count}


def is_plain() -> bool:
    """Whether nothing of a trace is left in this worker."""
    worker = current_node().worker
    links = [peer.link for peer in current().peers.values() if peer.link is not None]
    return (
        not RECORDER.get().is_on
        and not any(isinstance(each, TracingWatcher) for each in worker.watchers)
        and type(worker.tensor_messages).__name__ == "TensorMessages"
        and all(link.watcher is None for link in links)
    )


@pytest.fixture(scope="module")
def trio(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
        for name in group.names:  # So that all pairs are connected.
            rpc.rpc_sync(name, onwards, args=(1,))
        yield group


WORKERS = ("driver", "worker0", "worker1")


def step() -> int:
    """Calls, nested calls, references, a backward pass and a step of an optimizer."""
    weights = torch.ones(4, requires_grad=True)
    for _ in range(3):
        rpc.rpc_sync("worker0", onwards, args=(weights,))
    for each in [rpc.rpc_async("worker1", later, args=(number,)) for number in range(4)]:
        each.wait()
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("worker0", fail)
    rpc.rpc_sync("driver", double, args=(3,))
    rpc.rpc_sync("worker0", lambda: 7)
    large = rpc.remote("worker0", double, args=(torch.ones(1 << 18),))
    assert large.to_here().sum() == 1 << 19
    assert rpc.remote("worker0", str, args=("a",)).remote().upper().to_here() == "A"
    each = mapreduce.exclusive_batch_partitioner
    mapped = mapreduce.remote_sync_call(double, args=(torch.arange(6),), partitioner=each)
    assert torch.cat(mapped).tolist() == list(range(0, 12, 2))
    module = RemoteModule("worker1", torch.nn.Linear, (4, 4))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    with context() as context_id:
        hidden = rpc.rpc_sync("worker0", onwards, args=(weights,))
        backward(context_id, [module(hidden).sum()])
        optimizer.step(context_id)
    # Workers tell one another of the end of a context, without answers.
    wait_until(
        lambda: not any(rpc.rpc_sync(name, count_contexts) for name in WORKERS),
        lambda: "contexts are left",
    )
    return context_id


def count_contexts() -> int:
    return len(current_node().worker.contexts.ids())


class Traced:
    """A traced step, and what the counters counted meanwhile."""

    def __init__(self, path: Path) -> None:
        for name in WORKERS:
            rpc.rpc_sync(name, count_calls)
        before = {name: rpc.rpc_sync(name, counted) for name in WORKERS}
        moved_before = {name: rpc.rpc_sync(name, moved) for name in WORKERS}
        with Trace(path) as self.trace:
            self.context_id = step()
        self.moved = {
            name: Counter(rpc.rpc_sync(name, moved)) - Counter(moved_before[name])
            for name in WORKERS
        }
        self.counted = {name: Counter(rpc.rpc_sync(name, counted)) for name in WORKERS}
        for name in WORKERS:
            self.counted[name] -= Counter(before[name])
        self.found: Found = read_trace(path)


@pytest.fixture(scope="module")
def traced(trio: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced(tmp_path_factory.mktemp("trace") / "step.json")


MEASURED = {f"{__name__}.counted", f"{__name__}.moved"}
"""The calls of the test itself, before and after the trace."""


def test_the_trace_has_every_call_that_the_counters_have(traced: Traced) -> None:
    by_worker: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in WORKERS}
    for event in traced.found.slices:
        if event["cat"] in ("call", "create"):
            by_worker[traced.found.worker_of(event)][event["args"]["function"], "out"] += 1
        elif event["cat"] == "run":
            by_worker[traced.found.worker_of(event)][event["args"]["function"], "in"] += 1
    for name in WORKERS:
        expected = {k: n for k, n in traced.counted[name].items() if k[0] not in MEASURED}
        assert dict(by_worker[name]) == expected, name
    assert by_worker["driver"][f"{__name__}.onwards", "out"] == 4
    assert by_worker["worker1"][f"{__name__}.double", "in"] == 4 + 2
    # Parts of a map, two of which go to each worker, also have the name of the function.
    assert by_worker["driver"][f"{__name__}.double", "out"] == 2 + 3 * 2
    assert by_worker["driver"]["upper of a reference", "out"] == 1


def test_every_call_has_its_arrows(traced: Traced) -> None:
    chains = Counter(
        (flow[0]["args"].get("call"), *[each["cat"] for each in flow])
        for flow in traced.found.flows.values()
    )
    runs = {each["args"]["call"]: each for each in traced.found.of("run")}
    calls = [*traced.found.of("call"), *traced.found.of("create")]
    assert runs.keys() == {call["args"]["call"] for call in calls}
    for call in calls:
        key, worker = call["args"]["call"], traced.found.worker_of(call)
        # A part of a map may begin in one thread and end in another.
        end = "mark" if runs[key]["ph"] == "b" else "run"
        if call["args"]["to"] == worker:
            begin = "mark" if call["ph"] == "b" else call["cat"]
            assert chains[key, begin, end] == 1, call
            continue
        assert chains[key, "send", "receive", end] == 1, call
        if call["cat"] == "call":
            assert chains[key, "send", "receive"] == 1, call


def test_the_trace_has_every_byte_that_the_connections_count(trio: Cluster) -> None:
    trace, agent = 7, current()
    links = {peer.id: peer.link for peer in agent.peers.values() if peer.link is not None}
    recording = RECORDER.get()
    with stable_counts(links):
        recorder.begin(trace, 1000, False)
    before = {peer: (link.bytes_sent, link.bytes_received) for peer, link in links.items()}
    rows = recording._recording._rows  # type: ignore[union-attr]
    step()
    with stable_counts(links):
        found, _, dropped = rows.end()
    recorder.forget(trace)
    assert dropped == 0
    sent, received = Counter[int](), Counter[int]()
    for _, tag, *fields in found:
        if tag in (SENT, RECEIVED):
            (sent if tag == SENT else received)[fields[2]] += fields[3]
    for peer, link in links.items():
        assert sent[peer] == link.bytes_sent - before[peer][0]
        assert received[peer] == link.bytes_received - before[peer][1]


@contextlib.contextmanager
def stable_counts(links: dict[int, Any]) -> Iterator[None]:
    """Runs a block when nothing has been sent or received for a moment."""
    seen: list[Any] = []

    def are_stable() -> bool:
        seen.append([(link.bytes_sent, link.bytes_received) for link in links.values()])
        return len(seen) > 20 and all(each == seen[-1] for each in seen[-20:])

    wait_until(are_stable, lambda: "the links are never quiet")
    yield


def test_the_trace_has_every_byte_of_every_channel(traced: Traced) -> None:
    offered, fetched = Counter[str](), Counter[str]()
    for event in traced.found.of("send"):
        for channel, count in event["args"].get("tensors", {}).items():
            if channel not in ("inline", "stream"):
                offered["lent" if channel == "lent" else f"sent {channel}"] += count
    for event in traced.found.of("fetch"):
        for channel, count in event["args"].get("tensors", {}).items():
            fetched[f"received {channel}"] += count
    moved = sum(traced.moved.values(), Counter[str]())
    assert offered + fetched == moved
    assert sum(traced.moved["driver"].values()) >= 2 << 20


def test_no_message_between_two_workers_lacks_an_end(traced: Traced) -> None:
    arrows = [flow[:2] for flow in traced.found.flows.values() if flow[0]["cat"] == "send"]
    for sent, received in arrows:
        assert received["ts"] >= sent["ts"], sent
    kinds = ("call", "reply", "gradients")
    for category in ("send", "receive"):
        ends = [each for each in traced.found.of(category) if each["args"]["kind"] in kinds]
        assert all("bind_id" in each for each in ends)


def test_perfetto_counts_the_same(traced: Traced) -> None:
    trace_processor = pytest.importorskip("perfetto.trace_processor")
    try:
        processor = trace_processor.TraceProcessor(trace=str(traced.trace.path))
    except Exception as error:  # The package downloads the program when it is first used.
        pytest.skip(f"Perfetto's trace processor cannot be had: {error}")
    with contextlib.closing(processor):

        def number(query: str) -> int:
            (row,) = processor.query(query)
            return int(row.n)

        assert number("select count(*) as n from slice") == len(traced.found.slices)
        assert number("select count(*) as n from slice where category = 'run'") == len(
            traced.found.of("run")
        )
        steps = sum(len(flow) - 1 for flow in traced.found.flows.values())
        assert number("select count(*) as n from flow") == steps
        sent = "select sum(extract_arg(arg_set_id, 'args.bytes')) as n from slice "
        told = sum(event["args"]["bytes"] for event in traced.found.of("send"))
        assert number(f"{sent} where category = 'send'") == told
        errors = "select sum(value) as n from stats where severity in ('error', 'data_loss')"
        assert number(errors) == 0


# What a trace leaves behind, and what it does not take


def test_a_trace_leaves_nothing_behind(trio: Cluster, tmp_path: Path) -> None:
    for name in WORKERS:  # They count from another test.
        rpc.rpc_sync(name, stop_counting)
    with Trace(tmp_path / "trace.json"):
        assert not is_plain()
        assert not rpc.rpc_sync("worker0", is_plain)
    for name in WORKERS:
        assert rpc.rpc_sync(name, is_plain), name


def test_a_file_that_cannot_be_written_is_named(
    trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chrome, "write", write)
    said = pytest.raises(ObserveError, match=r"written to .*trace\.json: .* No space left")
    with said, Trace(tmp_path / "trace.json"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_values_are_not_in_the_trace(trio: Cluster, tmp_path: Path) -> None:
    password, text = "correct-horse-battery", b"staple" * 4
    with Trace(tmp_path / "trace.json"):
        assert rpc.rpc_sync("worker0", double, args=(password,)) == password * 2
        rpc.rpc_sync("worker1", len, args=(text,))
        with pytest.raises(KeyError):
            rpc.rpc_sync("worker0", {}.__getitem__, args=(password,))
    content = (tmp_path / "trace.json").read_text()
    assert "double" in content
    assert "horse" not in content
    assert "staple" not in content


def test_a_full_ring_drops_the_oldest_and_says_so(trio: Cluster, tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json", limit=50) as trace:
        for number in range(40):
            rpc.rpc_sync("worker0", double, args=(number,))
        rpc.rpc_sync("worker0", onwards, args=(1,))
    found = read_trace(tmp_path / "trace.json")
    assert trace.dropped["driver"] > 0
    assert trace.dropped["worker0"] > 0
    assert "worker1" not in trace.dropped
    (about,) = [each for each in found.about["workers"] if each["name"] == "driver"]
    assert (about["records"], about["dropped"]) == (50, trace.dropped["driver"])
    own = [each for each in found.of("call") if found.worker_of(each) == "driver"]
    assert own[-1]["args"]["function"].endswith(".onwards")


def test_a_second_trace_is_refused_and_the_first_goes_on(trio: Cluster, tmp_path: Path) -> None:
    with Trace(tmp_path / "first.json"):
        with pytest.raises(ObserveError, match="traced already, by worker 'driver'"):
            Trace(tmp_path / "second.json").__enter__()
        rpc.rpc_sync("worker0", double, args=(1,))
    assert len(read_trace(tmp_path / "first.json").of("run")) == 1
    assert not (tmp_path / "second.json").exists()


def trace_at_once(path: str, meet: Callable[[], object]) -> list[bool]:
    """Begins traces at the same moments as others; returns which began."""
    began = []
    for _ in range(3):
        meet()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(Trace(path))
                began.append(True)
            except ObserveError:
                began.append(False)
            meet()
    return began


def meet_others() -> None:
    rpc.barrier(timeout=LIMIT_S)


def trace_with_others(path: str) -> list[bool]:
    return trace_at_once(path, meet_others)


@pytest.mark.keeps("descriptors")
def test_of_traces_that_begin_at_once_one_begins(trio: Cluster, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.json") for number in range(4)]
    meeting = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        of_threads = list(pool.map(lambda path: trace_at_once(path, meeting.wait), paths))
    there = [
        rpc.rpc_async(f"worker{each}", trace_with_others, args=(paths[each],)) for each in (0, 1)
    ]
    of_workers = [trace_with_others(paths[2]), *[each.wait() for each in there]]
    for found in (of_threads, of_workers):
        for began in zip(*found, strict=True):
            assert sum(began) == 1, found


def test_clocks_that_may_differ_are_measured(
    trio: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "clock_id", lambda: "the clock of another host")
    with Trace(tmp_path / "trace.json") as trace:
        rpc.rpc_sync("worker0", onwards, args=(1,))
    errors = {
        each["name"]: each["clock_error_us"] for each in read_trace(trace.path).about["workers"]
    }
    assert errors["driver"] == 0
    assert errors["worker0"] > 0
    assert trace.clock_error_s * 1e6 == pytest.approx(
        errors["worker0"] + errors["worker1"], abs=0.01
    )
    # In truth the clocks are one: no message arrives earlier than that before it is sent.
    for flow in read_trace(trace.path).flows.values():
        assert flow[-1]["ts"] * 1e-6 > flow[0]["ts"] * 1e-6 - trace.clock_error_s


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"limit": 0}, "a worker keeps from 1"),
        ({"timeout": 0}, "a positive number of seconds"),
        ({"path": "no/such/folder/trace.json"}, "'no/such/folder' does not exist"),
        ({"path": "/"}, "'/' is a folder; pass the name of a file"),
        ({"path": "/dev/null"}, "'/dev/null' is a device or pipe; pass another name"),
    ],
)
def test_bad_arguments_are_named(others: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Trace(**{"path": tmp_path / "trace.json", **others})
    for name, value in (("path", 7), ("profiler", 1), ("limit", "many"), ("timeout", "long")):
        with pytest.raises(TypeError, match=name):
            Trace(**{"path": tmp_path / "trace.json", name: value})
