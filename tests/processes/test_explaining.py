"""Observers, and the files of workers, tell where a group is stuck and why."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import torchweft
from tests.command_line import said_by
from tests.contract.processes import deadlocks
from tests.contract.processes.functions import options, stop, wait_until
from tests.contract.processes.observers import ANSWER_S, OPEN, group_of
from torchweft import Secret, rpc
from torchweft.cli.top import DEADLOCK_STATUS
from torchweft.engine.worker.current import current
from torchweft.errors import GroupNotFound, ObserverRefused, ShutdownError
from torchweft.launch import Cluster, Nursery
from torchweft.observe.group import Group, find, read_folder
from torchweft.observe.session import Access
from torchweft.observe.waits import WaitGraph, explain

STOPPED_S = 0.5
LATE_S = 1.2


@pytest.fixture
def stuck(nursery: Nursery) -> Iterator[Cluster]:
    """Three workers that a test leaves stuck, and that are killed."""
    single = options(num_worker_threads=1, rpc_timeout=60.0)
    group = torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=single, check=False, leave_timeout=0.5
    )
    with contextlib.suppress(ShutdownError), group:
        yield group


def explained_when(group: Group, text: str, timeout_s: float = ANSWER_S) -> tuple[str, WaitGraph]:
    """Asks until the explanation has a text; returns the explanation and the graph."""
    found: list[Any] = []

    def look() -> bool:
        answers = group.ask(timeout_s)
        graph = WaitGraph(answers.reports, answers.silent)
        found[:] = [explain(graph), graph, answers]
        return text in found[0]

    wait_until(look, lambda: f"{found[0]}\n{found[2]}")
    return found[0], found[1]


@pytest.mark.keeps("threads", "descriptors", "processes")
def test_two_workers_that_call_each_other_with_one_thread_each(
    stuck: Cluster, tmp_path: Path
) -> None:
    for worker, other in (("worker0", "worker1"), ("worker1", "worker0")):
        rpc.rpc_async(worker, deadlocks.step, args=(other, str(tmp_path)))
    said, graph = explained_when(group_of(stuck), "deadlock, perhaps")
    assert "deadlock, perhaps: worker0 and worker1 wait for each other" in said
    for mark, function in (("calls the other", "step"), ("takes the lock", "update")):
        place = deadlocks.line_of(mark) + function
        assert said.count(place) == 2, said
    assert [len(circle) for circle in graph.circles()] == [4]


@pytest.mark.keeps("threads", "descriptors", "processes")
@pytest.mark.parametrize(
    ("function", "waits", "runs"),
    [
        (deadlocks.map_twice, "waits for the map", "read"),
        (deadlocks.follow, "waits for a line", "read_lines"),
    ],
)
def test_a_map_and_a_stream_whose_function_does_not_return(
    stuck: Cluster, tmp_path: Path, function: Any, waits: str, runs: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    rpc.rpc_async("worker0", function, args=("worker1", str(tmp_path / "pipe")))
    said, _ = explained_when(
        group_of(stuck),
        f"worker0 waits, in the end, for\n  worker1: {deadlocks.__name__}.{runs} (called by "
        "'worker0')",
    )
    assert said.count("in the end") == 1, said
    assert deadlocks.line_of(waits) + function.__name__ in said


@pytest.mark.parametrize(
    ("function", "waits", "runs"),
    [
        (deadlocks.score, "waits for any score", "tests.contract.processes.deadlocks.read"),
        (
            deadlocks.follow_several,
            "waits for any line",
            "tests.contract.processes.deadlocks.read_lines",
        ),
        (deadlocks.run_stages, "waits for its stages", "torchweft.pipeline.host.Host.start"),
    ],
)
def test_what_waits_for_any_of_several_is_followed(
    stuck: Cluster, tmp_path: Path, function: Any, waits: str, runs: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    rpc.rpc_async("worker0", function, args=("worker1", str(tmp_path / "pipe")))
    said, _ = explained_when(
        group_of(stuck),
        f"worker0 waits, in the end, for\n  worker1: {runs} (called by 'worker0')",
    )
    assert deadlocks.line_of(waits) + function.__name__ in said
    if function is deadlocks.run_stages:
        assert deadlocks.line_of("waits for a writer") + "read" in said
        assert "'worker1' to send the gradients of micro-batch 0 from stage 1" in said
    else:
        assert said.count(" or 'worker1' to run ") == said.count("in the end"), said


@pytest.mark.keeps("threads", "descriptors", "processes")
def test_a_backward_pass_whose_worker_is_stopped(stuck: Cluster, tmp_path: Path) -> None:
    group = group_of(stuck)
    pid = stuck.pids["worker1"]
    rpc.rpc_async("worker0", deadlocks.train, args=("worker1", str(tmp_path)))
    wait_until((tmp_path / "forward").exists, lambda: "there was no forward pass")
    stop(pid)
    try:
        (tmp_path / "stopped").touch()
        said, graph = explained_when(group, "a backward pass", STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (
        f"worker 'worker1', which does not answer within {STOPPED_S:g} s: its process {pid}" in said
    )
    assert f"is stopped by a signal; kill -CONT {pid} lets it go on" in said
    assert deadlocks.line_of("runs the backward pass") + "train" in said
    assert graph.silent.keys() == {"worker1"}


# Who may observe


@pytest.fixture
def guarded() -> Iterator[Secret]:
    """This process alone is a group with a secret."""
    secret = Secret(b"a secret of these tests")
    guarded_options = rpc.RpcBackendOptions(store=HashStore(), secret=secret)
    rpc.init_rpc("guarded", rank=0, world_size=1, rpc_backend_options=guarded_options)
    yield secret
    rpc.shutdown()


@pytest.mark.keeps("threads", "descriptors")
def test_a_group_with_a_secret_is_shown_to_who_has_it(guarded: Secret) -> None:
    pid = str(os.getpid())
    unix, tcp = current().me.registration.addresses
    for target in (pid, unix, tcp):
        group = find(target, Access(guarded))
        assert group.workers == ["guarded"]
        assert [report.worker for report in group.ask(ANSWER_S).reports] == ["guarded"]
    for access, advice in (
        (OPEN, "set WEFT_SECRET_FILE to the file that the workers have"),
        (Access(Secret(b"another secret, as long")), "do not take the secret of this observer"),
    ):
        for address in (unix, tcp):
            with pytest.raises(ObserverRefused, match=advice):
                find(address, access)
        with pytest.raises((ObserverRefused, GroupNotFound)):
            find(pid, access)


# Files


@pytest.mark.keeps("threads", "descriptors", "processes")
def test_the_signal_has_each_worker_write_what_it_does(nursery: Nursery, tmp_path: Path) -> None:
    environment = {"WEFT_DUMP_DIR": str(tmp_path)}
    with torchweft.cluster(
        workers=2, nursery=nursery, env=environment, rpc_backend_options=options()
    ) as group:
        # Others may write into the folder, and put links to a file of this user there.
        precious = tmp_path / "precious"
        precious.write_text("precious")
        for name in ("worker0.weft.json", "worker0.weft.json.new"):
            (tmp_path / name).symlink_to(precious)
        for name, pid in group.pids.items():
            assert rpc.rpc_sync(name, os.getpid) == pid  # It has joined.
            os.kill(pid, signal.SIGQUIT)
        names = {"worker0.weft.json", "worker1.weft.json"}
        wait_until(
            lambda: names <= {each.name for each in tmp_path.iterdir() if not each.is_symlink()},
            lambda: str(list(tmp_path.iterdir())),
        )
        assert precious.read_text() == "precious"
        answers, _ = read_folder(str(tmp_path))
        assert [report.worker for report in answers.reports] == ["worker0", "worker1"]
        assert "has written no file here" in answers.silent["driver"]
        assert any(thread.frames for thread in answers.reports[0].threads)
        assert rpc.rpc_sync("worker0", os.getpid) == group.pids["worker0"]


@pytest.mark.keeps("threads", "descriptors", "processes")
def test_a_wait_that_takes_too_long_has_all_workers_write(nursery: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    environment = {"WEFT_DUMP_DIR": str(folder), "WEFT_DUMP_AFTER_S": str(LATE_S)}
    group = torchweft.cluster(
        workers=3,
        nursery=nursery,
        env=environment,
        rpc_backend_options=options(num_worker_threads=1, rpc_timeout=60.0),
        check=False,
        leave_timeout=0.5,
    )
    with contextlib.suppress(ShutdownError), group:
        for worker, other in (("worker0", "worker1"), ("worker1", "worker0")):
            rpc.rpc_async(worker, deadlocks.step, args=(other, str(tmp_path)))
        names = {f"worker{rank}.weft.json" for rank in range(3)}  # worker2 waits for nobody.
        wait_until(
            lambda: folder.exists() and names <= {each.name for each in folder.iterdir()},
            lambda: str(list(tmp_path.iterdir())),
        )
        status, said, _ = said_by("explain", str(folder))
        assert status == DEADLOCK_STATUS
        assert "deadlock, perhaps: worker0 and worker1 wait for each other" in said
        assert said.count(deadlocks.line_of("takes the lock") + "update") == 2


@pytest.fixture
def stuck_with_files(nursery: Nursery, tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    """Three workers that a test leaves stuck, and the folder of their files."""
    folder = tmp_path / "reports"
    group = torchweft.cluster(
        workers=3,
        nursery=nursery,
        env={"WEFT_DUMP_DIR": str(folder)},
        rpc_backend_options=options(num_worker_threads=1, rpc_timeout=60.0),
        check=False,
        leave_timeout=0.5,
    )
    with contextlib.suppress(ShutdownError), group:
        yield group, folder


def dump(group: Cluster, folder: Path, *names: str) -> None:
    """Has workers write their files, and waits for these."""
    former = {name: last_written(folder, name) for name in names}
    for name in names:
        os.kill(group.pids[name], signal.SIGQUIT)
    wait_until(
        lambda: all(last_written(folder, name) > former[name] for name in names),
        lambda: str(former),
    )


def last_written(folder: Path, name: str) -> int:
    path = folder / f"{name}.weft.json"
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.keeps("threads", "descriptors", "processes")
def test_files_name_the_lines_of_a_barrier_that_one_worker_never_reaches(
    stuck_with_files: tuple[Cluster, Path], tmp_path: Path
) -> None:
    group, folder = stuck_with_files
    everybody = ["worker0", "worker1", "worker2"]
    for worker in everybody[:2]:
        rpc.rpc_async(worker, deadlocks.synchronize, args=(everybody,))
    os.mkfifo(tmp_path / "pipe")
    rpc.rpc_async("worker2", deadlocks.read, args=(str(tmp_path / "pipe"),))
    explained_when(group_of(group), "worker0 and worker1 wait, in the end, for")
    dump(group, folder, *everybody)
    status, said, _ = said_by("explain", str(folder))
    assert status == 0  # The function of worker2 may return at any moment.
    assert "worker0 and worker1 wait, in the end, for\n  worker2: tests.contract.processes" in said
    assert said.count(deadlocks.line_of("comes to the barrier") + "synchronize") == 2
    assert deadlocks.line_of("waits for a writer") + "read" in said
