"""``torchweft run --on kubernetes`` against a stateful API server; no pod really runs."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.launchers.commands import TORCHWEFT, finished, started, wait_until
from tests.launchers.kubernetes_cluster import (
    JOB_SETS,
    NAMESPACE,
    Cluster,
    Object,
    cluster,
    ended,
    running,
    terminated,
    waiting,
)
from torchweft.errors import ConfigurationError, LaunchError, NotSupported
from torchweft.launch import Kubernetes, Order, RestartPolicy, kubernetes
from torchweft.launch import cluster as weft_cluster
from torchweft.launch.console import BinarySink, Console
from torchweft.launch.job import program_job, script_job
from torchweft.launch.kubernetes_manifest import Pods, job_set

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 20.0


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(kubernetes, "POLL_S", 0.05)
    with cluster(tmp_path) as made:
        monkeypatch.setenv("KUBECONFIG", made.kubeconfig())
        yield made


class Run:
    """A run of two workers in this process, while a thread plays the cluster."""

    def __init__(self) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()

    def __call__(self, launcher: Kubernetes, play: Callable[[], None] = lambda: None) -> int:
        job = program_job(["python", "train.py"])
        console = Console(BinarySink(self.out), BinarySink(self.err))
        failures: list[BaseException] = []

        def playing() -> None:
            try:
                play()
            except BaseException as error:
                failures.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=playing)
        thread.start()
        try:
            return launcher.run(Order(["worker0", "worker1"], job, console, RestartPolicy(limit=2)))
        finally:
            thread.join()
            assert not failures

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.getvalue().decode().splitlines())

    @property
    def said(self) -> str:
        return self.err.getvalue().decode()


@pytest.fixture
def run() -> Run:
    return Run()


def created(api: Cluster, name: str = "demo") -> Object:
    wait_until(lambda: f"{name}-secret" in api.names("v1/secrets"), LIMIT_S)
    return api.get(JOB_SETS, name)


def line(number: int, text: str) -> bytes:
    return f"2026-01-01T00:00:00.{number:09}Z {text}\n".encode()


def nothing_is_left(api: Cluster) -> bool:
    return not [*api.names(JOB_SETS), *api.names("v1/secrets"), *api.names("v1/pods")]


@pytest.mark.smoke
def test_logs_are_shown_by_worker_and_all_is_deleted(api: Cluster, run: Run) -> None:
    secrets: list[str] = []

    def play() -> None:
        job = created(api)
        secrets.append(api.get("v1/secrets", "demo-secret")["stringData"]["secret"])
        mounted = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert "demo-secret" in str(mounted["volumes"])
        assert secrets[0] not in str(job)
        api.log("demo-worker-0-0-x0", line(1, "a"), line(2, "10%\r20%"), b"2026-01-02 cut")
        api.log("demo-worker-0-1-x1", line(1, "b"))
        for rank in (0, 1):
            api.pod(job, rank, running())
        for rank in (0, 1):
            api.pod(job, rank, terminated(0))
        api.change(JOB_SETS, "demo", ended("Completed"))

    assert run(Kubernetes("r/train:1", name="demo"), play) == 0
    assert run.lines == ["[worker0] 20%", "[worker0] a", "[worker0] cut", "[worker1] b"]
    assert nothing_is_left(api)
    assert re.fullmatch("[0-9a-f]{64}", secrets[0])
    assert secrets[0] not in run.said + str(run.lines)


def test_the_first_worker_that_failed_gives_the_status(api: Cluster, run: Run) -> None:
    def play() -> None:
        job = created(api)
        api.pod(job, 0, terminated(1, "2026-01-01T00:00:09Z"))
        api.pod(job, 1, terminated(137, "2026-01-01T00:00:08Z", "OOMKilled"))
        api.change(JOB_SETS, "demo", ended("Failed"))

    assert run(Kubernetes("r/train:1", name="demo"), play) == 137
    assert "worker 'worker1' (pod demo-worker-0-1-x1) ended with exit code 137 (OOMKilled)" in (
        run.said
    )
    assert nothing_is_left(api)


def test_a_restart_of_the_group_is_told(api: Cluster, run: Run) -> None:
    def play() -> None:
        job = created(api)
        assert job["spec"]["failurePolicy"] == {"maxRestarts": 2}
        api.pod(job, 0, terminated(3))
        api.change(JOB_SETS, "demo", {"status": {"restarts": 1}})
        wait_until(lambda: "again" in run.said, LIMIT_S)
        api.pod(job, 0, terminated(0))
        api.change(JOB_SETS, "demo", ended("Completed"))

    assert run(Kubernetes("r/train:1", name="demo"), play) == 0
    assert "the group starts again, 1 of 2" in run.said


def test_a_log_that_breaks_off_goes_on_without_repetition(api: Cluster, run: Run) -> None:
    asked: list[str] = []

    def content(request: object) -> bytes:
        asked.append(str(request.params))  # type: ignore[attr-defined]
        return b"".join(line(number, f"line {number}") for number in range(len(asked) * 2))

    def play() -> None:
        job = created(api)
        api.log("demo-worker-0-0-x0", content)
        api.pod(job, 0, running())
        wait_until(lambda: len(run.lines) == 4, LIMIT_S)
        api.pod(job, 0, terminated(0))
        api.change(JOB_SETS, "demo", ended("Completed"))

    assert run(Kubernetes("r/train:1", name="demo"), play) == 0
    assert run.lines[:4] == [f"[worker0] line {number}" for number in range(4)]
    assert len(run.lines) == len(set(run.lines))
    assert "sinceSeconds" not in asked[0]
    assert "sinceSeconds" in asked[1]


def test_the_rest_of_a_log_is_asked_for_again(api: Cluster, run: Run) -> None:
    asked: list[object] = []

    def content(request: object) -> object:
        asked.append(request)
        if len(asked) < 3:
            raise ConnectionError("the node restarts")  # answered by status 500
        return line(1, "last words")

    def play() -> None:
        job = created(api)
        api.log("demo-worker-0-0-x0", content)
        api.pod(job, 0, terminated(0))
        api.change(JOB_SETS, "demo", ended("Completed"))

    assert run(Kubernetes("r/train:1", name="demo"), play) == 0
    assert run.lines == ["[worker0] last words"]


def test_a_job_set_may_wait_in_a_queue(api: Cluster, run: Run) -> None:
    def play() -> None:
        created(api)
        api.change(JOB_SETS, "demo", {"spec": {"suspend": True}})
        wait_until(lambda: "is suspended, as in a queue" in run.said, LIMIT_S)
        api.change(JOB_SETS, "demo", {"spec": {"suspend": False}})

    with pytest.raises(LaunchError, match="2 of 2 workers have not started within 1 s"):
        run(Kubernetes("r/train:1", name="demo", start_timeout_s=1), play)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            waiting("ImagePullBackOff", "Back-off pulling image 'r/train:1'"),
            "2 of 2 workers have not started within 0.5 s: worker 'worker0': Back-off pulling "
            r"image 'r/train:1' \(ImagePullBackOff\)",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
                    }
                ],
            },
            r"worker 'worker0': 0/4 nodes are available: 4 Insufficient nvidia.com/gpu. \(Unsch",
        ),
        (waiting("InvalidImageName", "bad"), r"worker 'worker0' cannot start: bad \(InvalidImage"),
        (waiting("ContainerCreating", ""), "2 of 2 .* no reason is known"),
    ],
)
def test_pods_that_do_not_start(api: Cluster, run: Run, status: Object, message: str) -> None:
    launcher = Kubernetes("r/train:1", name="demo", start_timeout_s=0.5)
    with pytest.raises(LaunchError, match=message):
        run(launcher, lambda: str(api.pod(created(api), 0, status)))  # type: ignore[arg-type]
    assert nothing_is_left(api)


def test_events_tell_why_there_are_no_pods(api: Cluster, run: Run) -> None:
    def event(about: str, kind: str) -> Object:
        return {
            "metadata": {"name": f"{about}.1"},
            "type": kind,
            "reason": "FailedCreate",
            "message": f"exceeded quota of {about}",
            "involvedObject": {"kind": "Job", "name": about},
        }

    for number, (about, kind) in enumerate(
        [("demo-worker-0", "Warning"), ("other-worker-0", "Warning"), ("demo-worker-0", "Normal")]
    ):
        api.put("v1/events", str(number), event(about, kind))
    with pytest.raises(LaunchError, match="Job demo-worker-0: exceeded quota of demo") as raised:
        run(Kubernetes("r/train:1", name="demo", start_timeout_s=0.3))
    assert "other" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "status", "body", "message"),
    [
        (
            JOB_SETS,
            403,
            {"message": "jobsets is forbidden: User 'eve' cannot create resource"},
            "does not let this user create the JobSet in namespace 'team': jobsets is forbidden",
        ),
        (JOB_SETS, 404, {"message": "not found"}, "^JobSet is not installed in this cluster"),
        (
            JOB_SETS,
            404,
            {"message": "not found", "details": {"kind": "namespaces"}},
            "^there is no namespace 'team'",
        ),
        (JOB_SETS, 401, {"message": "Unauthorized"}, "does not accept the credentials"),
        (JOB_SETS, 422, {"message": "spec.x: Invalid"}, r"refuses .* \(422\): spec.x: Invalid"),
        (JOB_SETS, 500, {}, r"cannot create the JobSet now \(500\)"),
        ("v1/secrets", 403, {"message": "secrets is forbidden"}, "create the Secret in namespace"),
        ("v1/secrets", 409, {"message": "is there"}, "such an object already: is there"),
    ],
)
def test_refusals(
    api: Cluster, run: Run, path: str, status: int, body: Object, message: str
) -> None:
    group, _, plural = path.rpartition("/")
    prefix = "/api/" if group == "v1" else "/apis/"
    url = f"post {prefix}{group}/namespaces/{NAMESPACE}/{plural}"
    api.do(lambda server: server[url] << status << body)
    with pytest.raises(LaunchError, match=message):
        run(Kubernetes("r/train:1", name="demo"))


def test_a_job_set_that_another_deletes_ends_the_run(api: Cluster, run: Run) -> None:
    def play() -> None:
        created(api)
        api.do(lambda server: server.objects[JOB_SETS, NAMESPACE, "demo"].delete())

    with pytest.raises(LaunchError, match="JobSet 'demo' was deleted by another program or user"):
        run(Kubernetes("r/train:1", name="demo"), play)


def test_ctrl_c_deletes_all(api: Cluster) -> None:
    command = ["run", "--on", "kubernetes", "--image", "r/train:1", "--job-name", "demo"]
    with started([*TORCHWEFT, *command, "-n", "2", "train.py"]) as process:
        job = created(api)
        # The log of a worker that still runs stays open; that of a silent one has not begun.
        is_asked = threading.Event()

        async def silent(request: object) -> None:
            is_asked.set()
            await asyncio.sleep(3600)

        api.log("demo-worker-0-0-x0", silent)
        api.log("demo-worker-0-1-x1", line(1, "hello"), ...)
        for rank in (0, 1):
            api.pod(job, rank, running())
        assert process.stdout is not None
        assert process.stdout.readline() == "[worker1] hello\n"
        wait_until(is_asked.is_set, LIMIT_S)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "SIGINT, deleting JobSet 'demo'" in said
    assert nothing_is_left(api)


def test_a_cluster_that_cannot_be_reached(tmp_path: Path, run: Run, api: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    os.environ["KUBECONFIG"] = api.kubeconfig(f"http://127.0.0.1:{port}")
    begun_s = time.monotonic()
    with pytest.raises(LaunchError, match=f"http://127.0.0.1:{port} cannot be reached"):
        run(Kubernetes("r/train:1"))
    assert time.monotonic() - begun_s < LIMIT_S


def test_no_configuration(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"no cluster is configured here.*set KUBECONFIG"):
        run(Kubernetes("r/train:1"))


def test_no_such_context(api: Cluster, run: Run) -> None:
    with pytest.raises(ConfigurationError, match=r"no cluster is configured here.*other"):
        run(Kubernetes("r/train:1", context="other"))


def test_a_dry_run_needs_no_cluster(tmp_path: Path) -> None:
    command = ["run", "--on", "kubernetes", "--image", "r/train:1", "-n", "2", "--dry-run", "a.py"]
    done = finished([*TORCHWEFT, *command], {"KUBECONFIG": str(tmp_path / "none")})
    assert done.returncode == 0, done.stderr
    assert "kind: JobSet" in done.stdout


def test_what_pods_cannot_do(run: Run) -> None:
    launcher = Kubernetes("r/train:1")
    with pytest.raises(NotSupported, match="workers that can reach it, which pods cannot"):
        weft_cluster(workers=1, on=launcher)
    console = Console(BinarySink(run.out), BinarySink(run.err))
    with pytest.raises(ConfigurationError, match="leave --warm out"):
        launcher.run(Order(["worker0"], script_job("a.py", []), console))
    one_by_one = RestartPolicy(limit=1, scope="worker")
    with pytest.raises(ConfigurationError, match="over hosts use --restart group"):
        launcher.run(Order(["worker0"], program_job(["python"]), console, one_by_one))


def test_the_client_knows_all_fields_of_jobs_and_pods() -> None:
    from kubernetes.client import ApiClient, V1JobTemplateSpec

    pods = Pods(
        image="r/train:1",
        command=["python", "a.py"],
        name="demo",
        names=["worker0", "ps"],
        tls="certs",
        cpus="2",
        gpus=1,
        memory="8Gi",
    )
    written = ApiClient().sanitize_for_serialization
    for job in job_set(pods)["spec"]["replicatedJobs"]:
        # Fields that it does not know would be missing, and of another type refused.
        assert written(V1JobTemplateSpec.from_dict(job["template"])) == job["template"]
        wrong = {"spec": {"template": {"spec": {"containers": [], "restartpolicy": "Never"}}}}
        assert written(V1JobTemplateSpec.from_dict(wrong)) != wrong
