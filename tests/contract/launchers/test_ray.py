"""``torchweft run --on ray`` and ``cluster(on=Ray(...))`` on a real Ray of three nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.contract.launchers import language_model, ray_cluster
from tests.contract.launchers.commands import (
    HELLO,
    TORCHWEFT,
    finished,
    greetings,
    joined,
    started,
    wait_until,
)
from tests.contract.launchers.language_model import LANGUAGE_MODEL, assert_same
from tests.contract.launchers.ray_cluster import NODES, RayCluster
from tests.contract.launchers.resuming import Resumed, trained
from tests.contract.processes.weft_run import read_pids, wait_until_gone

pytestmark = pytest.mark.timeout(300)

LIMIT_S = 60.0

WAITING = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
DYING = "import os, signal; os.environ['RANK'] == '1' and 1 / 0; signal.pause()"

RESERVED = """
import os
found = ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
print("threads {} GPUs {} local {} of {}".format(*map(os.environ.get, found)))
"""

# Where others can look: argument lists, and the variables of Ray's own processes.
SECRET = """
import os
from pathlib import Path

def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""

secret = Path(os.environ["WEFT_SECRET_FILE"]).read_bytes()
processes = list(Path("/proc").glob("[0-9]*"))
shown = b"".join(read(each / "cmdline") + read(each / "environ") for each in processes)
print("secret", secret.decode(), secret in shown, b"ray::" in shown, flush=True)
"""

CLUSTER = """
import signal, sys, threading
import torch
import torchweft
from torchweft import rpc
from torchweft.launch import Ray

with torchweft.cluster(workers=3, on=Ray(sys.argv[1], strategy="STRICT_SPREAD")) as cluster:
    for name in cluster.names:
        assert rpc.rpc_sync(name, torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    print("served by", *cluster.names)
print("threads", [each.name for each in threading.enumerate() if "weft" in each.name])
"""

# Tells the test when to kill a node; the workers of the others stay.
RESTARTING = """
import os, sys, time
import torchweft
from torchweft import rpc
from torchweft.launch import Ray

def life():
    return os.environ["WEFT_RESTART_COUNT"], os.getpid()

def life_of(name):
    return rpc.rpc_sync(name, life)

def alive(name, former):
    try:
        return life_of(name) == former[name]
    except torchweft.errors.WeftError:
        return False

names = ["a", "b", "c"]
with torchweft.cluster(names=names, on=Ray(sys.argv[1], strategy="SPREAD"), restarts=2) as cluster:
    former = {name: life_of(name) for name in names}
    print("kill a node", flush=True)
    deadline_s = time.monotonic() + 60
    while all(alive(name, former) for name in names) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for name in names:
        cluster.wait_for(name, 60)
    now = {name: life_of(name) for name in names}
    assert {life_of(name) for name in names} == {
        rpc.rpc_sync(other, life_of, args=(name,)) for other in names for name in names
    }
    print("lives", *sorted(count for count, _ in now.values()), flush=True)
    print("stayed", sum(now[name] == former[name] for name in names), flush=True)
"""

# A program that uses Ray itself keeps its connection, and gives both clusters back.
INSIDE = """
import sys
import torch
import torchweft
from torchweft import rpc
from torchweft.launch import Ray
import ray

ray.init(sys.argv[1], log_to_driver=False)

@ray.remote
def groups():
    return [each["state"] for each in ray.util.placement_group_table().values()]

def use_workers():
    with torchweft.cluster(workers=2, on=Ray(workers_per_bundle=2, num_cpus=0.5)):
        return rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist()

assert [use_workers(), use_workers()] == [[2, 2], [2, 2]]
assert ray.get(ray.remote(num_cpus=0)(use_workers).remote()) == [2, 2]
print("Ray still answers", "CREATED" in ray.get(groups.remote()))
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    # The paths of Ray's sockets must be short.
    directory = Path(tempfile.mkdtemp(prefix="weft-ray-"))
    try:
        with ray_cluster.running(directory) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def command(ray: RayCluster, *options: str, count: int = NODES) -> list[str]:
    given = ["--on", "ray", "-n", str(count), "--ray-address", ray.address]
    return [*TORCHWEFT, "run", *given, "--strategy", "SPREAD", *options]


def start(
    ray: RayCluster, tmp_path: Path, body: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    (tmp_path / "script.py").write_text(body)
    return started(command(ray, "script.py"), cwd=tmp_path)


def wait_until_given_back(ray: RayCluster) -> None:
    wait_until(lambda: set(ray.tell("groups").split()) <= {"REMOVED"}, LIMIT_S)


def test_workers_of_two_nodes_find_each_other(ray: RayCluster) -> None:
    done = finished(command(ray, "--workers-per-bundle", "2", "--num-cpus", "0.5", HELLO, count=3))
    assert done.returncode == 0, done.stderr
    assert joined(done.stdout) == greetings(3)
    assert "[worker2] joined worker2" in done.stdout
    # The line of each worker about its meeting place, and on a busy machine those of long waits.
    assert len([line for line in done.stderr.splitlines() if "has waited" not in line]) == 3
    wait_until_given_back(ray)


def test_nothing_that_others_see_has_the_secret(ray: RayCluster, tmp_path: Path) -> None:
    with start(ray, tmp_path, SECRET) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    found = [line.split()[2:] for line in out.splitlines() if "secret" in line]
    assert [each[1:] for each in found] == [["False", "True"]] * NODES, err
    secrets = {each[0] for each in found}
    assert len(secrets) == 1
    secret = secrets.pop().encode()
    logs = [path.read_bytes() for path in ray.directory.rglob("*") if path.is_file()]
    assert logs
    assert not any(secret in log for log in [err.encode(), *logs])


def test_a_worker_that_dies_ends_the_run(ray: RayCluster, tmp_path: Path) -> None:
    with start(ray, tmp_path, DYING) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "worker 'worker1' (rank 1, pid " in err
    assert "[worker1] ZeroDivisionError" in err
    wait_until_given_back(ray)


def test_ctrl_c_ends_everything(ray: RayCluster, tmp_path: Path) -> None:
    with start(ray, tmp_path, WAITING) as process:
        pids = read_pids(process, NODES)
        process.send_signal(signal.SIGINT)
        wait_until_gone(pids, LIMIT_S)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "SIGINT, ending the workers" in err
    assert "KeyboardInterrupt" in err  # Ray blocks the signal in its processes.
    wait_until_given_back(ray)


def test_nothing_is_left_of_a_launcher_that_is_killed(ray: RayCluster, tmp_path: Path) -> None:
    with start(ray, tmp_path, WAITING) as process:
        pids = read_pids(process, NODES)
        process.kill()
        wait_until_gone(pids, LIMIT_S)
    wait_until_given_back(ray)


def test_workers_reserve_what_they_are_given(ray: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESERVED)
    more = "--num-cpus 2 --num-gpus 1 --resources special=0.5 --labels zone=a --strategy PACK"
    run = ["env", "-u", "OMP_NUM_THREADS", *command(ray, *more.split(), "script.py")]
    done = finished(run, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == [
        f"[worker{rank}] threads 2 GPUs 0 local 0 of 1" for rank in range(NODES)
    ], done.stderr


def test_labels_that_no_node_has(ray: RayCluster) -> None:
    done = finished(command(ray, "--labels", "zone=b", "--ray-timeout", "2", HELLO))
    assert done.returncode == 1
    assert "on nodes with the labels {'zone': 'b'} within 2 s" in done.stderr


def test_resources_that_the_cluster_does_not_have(ray: RayCluster) -> None:
    begin_s = time.monotonic()
    done = finished(command(ray, "--num-gpus", "2", "--ray-timeout", "2", HELLO))
    assert done.returncode == 1
    assert "GPU: 6 wanted, the cluster has 3, 3 free" in done.stderr
    assert "CPU: 3 wanted, the cluster has 6, 6 free" in done.stderr
    assert "3 bundles of up to 1 CPU, 2 GPU each (SPREAD) within 2 s" in done.stderr
    assert time.monotonic() - begin_s < LIMIT_S
    wait_until_given_back(ray)


def test_ctrl_c_while_resources_are_awaited(ray: RayCluster) -> None:
    with started(command(ray, "--num-gpus", "2", "--ray-timeout", "100", HELLO)) as process:
        wait_until(lambda: "PENDING" in ray.tell("groups"), LIMIT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    wait_until_given_back(ray)


def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        done = finished(
            [*TORCHWEFT, "run", "--on", "ray", "-n", "1", HELLO], {"RAY_ADDRESS": address}
        )
    assert done.returncode == 1
    assert f"torchweft run: no Ray answers at {address} ([Errno 111]" in done.stderr


def test_another_version_of_ray(ray: RayCluster, tmp_path: Path) -> None:
    # As if this process had it: the check is Ray's own.
    (tmp_path / "sitecustomize.py").write_text("import ray; ray.__version__ = '1.0'")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = finished(command(ray, HELLO), {"PYTHONPATH": path})
    assert done.returncode == 1
    assert f"at {ray.address} cannot be used from here, with Ray 1.0: " in done.stderr
    assert "Version mismatch" in done.stderr


def test_an_interpreter_that_is_not_there(ray: RayCluster) -> None:
    done = finished(command(ray, "--python", "/no/such/python", HELLO))
    assert done.returncode == 1
    assert re.search(r"host 'bundle \d' cannot be reached: Ray: .*/no/such/python", done.stderr)


def test_a_killed_node_is_replaced_and_the_result_is_the_same(
    ray: RayCluster, tmp_path: Path, undisturbed: Resumed
) -> None:
    options = ("--restarts", "2", "--backoff", "0.1")
    try:
        found = trained(
            command(ray, *options),
            tmp_path,
            killed_at=4,
            kill=lambda: ray.tell("remove"),
        )
    finally:
        ray.tell("add")
    assert [found.begun[0], len(found.begun)] == [0, 2]
    assert found.begun[1] >= 4
    assert found.result == undisturbed.result
    assert len(found.result["losses"]) == 60
    assert "was lost" in found.err
    assert "the group was started again once" in found.err
    wait_until_given_back(ray)


def test_a_killed_node_without_restarts_ends_the_run(ray: RayCluster, tmp_path: Path) -> None:
    try:
        with start(ray, tmp_path, WAITING) as process:
            pids = read_pids(process, NODES)
            ray.tell("remove")
            wait_until_gone(pids, LIMIT_S)
            _, err = process.communicate(timeout=LIMIT_S)
    finally:
        ray.tell("add")
    assert process.returncode == 1
    assert re.search(r"host 'bundle \d' was lost: its agent ended \(Ray: The actor", err), err


def test_a_killed_node_that_nothing_replaces(ray: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    options = ("--restarts", "2", "--strategy", "STRICT_SPREAD", "--ray-timeout", "10")
    try:
        with started(command(ray, *options, "script.py"), cwd=tmp_path) as process:
            pids = read_pids(process, NODES)
            ray.tell("remove")
            wait_until_gone(pids, LIMIT_S)
            _, err = process.communicate(timeout=LIMIT_S)
    finally:
        ray.tell("add")
    assert process.returncode == 1
    assert "is not there: Ray has found no place for 3 bundles" in err
    assert "STRICT_SPREAD" in err


@pytest.mark.smoke
def test_a_ray_that_is_started_for_the_run_ends_with_it() -> None:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="weft-ray-") as directory:
        own = {**ray_cluster.SMALL, "RAY_TMPDIR": directory, "RAY_AUTH_MODE": "disabled"}
        given = ["--on", "ray", "-n", "1", "--ray-address", "local", HELLO]
        done = finished([*TORCHWEFT, "run", *given], own)
        assert joined(done.stdout) == greetings(1), done.stderr
        assert any(Path(directory).rglob("raylet*"))
        wait_until(lambda: not processes_with(directory), LIMIT_S)


def processes_with(text: str) -> list[str]:
    """Returns the processes with a text in their arguments."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (each / "cmdline").read_bytes():
                found.append(each.name)
    return found


def test_a_cluster(ray: RayCluster) -> None:
    done = finished([sys.executable, "-c", CLUSTER, ray.address])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["served by worker0 worker1 worker2", "threads []"]
    wait_until_given_back(ray)


def test_the_language_model_inside_of_ray(
    ray: RayCluster, tmp_path: Path, perplexities: list[float]
) -> None:
    inside = [*command(ray, count=language_model.WORKERS), LANGUAGE_MODEL, "--inside"]
    assert_same(language_model.trained(inside, tmp_path), perplexities)


def test_the_language_model_starts_workers_on_ray(
    ray: RayCluster, tmp_path: Path, perplexities: list[float]
) -> None:
    around = [sys.executable, LANGUAGE_MODEL, "--on", "ray"]
    found = language_model.trained(around, tmp_path, {"RAY_ADDRESS": ray.address})
    assert_same(found, perplexities)


def test_the_language_model_with_too_few_workers(ray: RayCluster) -> None:
    done = finished([*command(ray, count=1), LANGUAGE_MODEL, "--inside"])
    assert done.returncode == 2
    assert "need 4 workers, but the launcher has started 1" in done.stderr


def test_a_worker_of_a_cluster_comes_back_under_its_name(ray: RayCluster) -> None:
    try:
        with started([sys.executable, "-c", RESTARTING, ray.address]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "kill a node\n"
            ray.tell("remove")
            out, err = process.communicate(timeout=LIMIT_S)
    finally:
        ray.tell("add")
    assert process.returncode == 0, err
    # Ray writes about its node in between.
    assert [line for line in out.splitlines() if line.startswith(("lives", "stayed"))] == [
        "lives 0 0 1",
        "stayed 2",
    ]
    assert re.search(r"weft: .* ended, as host 'bundle \d' was lost: .* restart 1 of 2", err)
    wait_until_given_back(ray)


def test_a_cluster_in_a_program_of_ray(ray: RayCluster) -> None:
    done = finished([sys.executable, "-c", INSIDE, ray.address])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Ray still answers False"
