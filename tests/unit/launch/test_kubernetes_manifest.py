"""Objects for Kubernetes, against the fields that JobSet publishes.

The client's classes check the parts that are Kubernetes' own, in ``tests/launchers``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kubernetes_pods import fields_of, pod_of, variables_of
from torchweft.errors import ConfigurationError
from torchweft.launch.kubernetes_manifest import Object, Pods, job_set
from torchweft.rpc.options import find_placement
from torchweft.scraping import Address

SPEC_OF_JOB_SET = {
    "coordinator",
    "failurePolicy",
    "managedBy",
    "network",
    "replicatedJobs",
    "startupPolicy",
    "successPolicy",
    "suspend",
    "ttlSecondsAfterFinished",
    "volumeClaimPolicies",
}
REPLICATED_JOB = {"dependsOn", "groupName", "name", "replicas", "template"}
NETWORK = {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"}
FAILURE_POLICY = {"maxRestarts", "restartStrategy", "rules"}


def pods(**more: Any) -> Pods:
    fields = {"image": "r/train:1", "command": ["python", "a.py"], "name": "demo"}
    return Pods(**(fields | {"names": ["w0", "w1", "w2"]} | more))


def check_job_set(spec: Object) -> None:
    assert spec.keys() <= SPEC_OF_JOB_SET
    assert spec["network"].keys() <= NETWORK
    assert spec["failurePolicy"].keys() <= FAILURE_POLICY
    names = [job["name"] for job in spec["replicatedJobs"]]
    assert len(set(names)) == len(names)
    for job in spec["replicatedJobs"]:
        assert job.keys() <= REPLICATED_JOB
        assert job["template"]["spec"]["completionMode"] == "Indexed"


def test_a_worker_finds_its_place_in_a_job_set() -> None:
    job = job_set(pods(names=[f"trainer{rank}" for rank in range(3)], restarts=4, master_port=77))
    check_job_set(job["spec"])
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 4}
    (replicated,) = job["spec"]["replicatedJobs"]
    assert (replicated["replicas"], replicated["template"]["spec"]["completions"]) == (1, 3)
    variables = variables_of(pod_of(job), fields_of(1))
    assert variables["WEFT_WORKER_NAME"] == "trainer1"
    assert variables["WEFT_RESTART_COUNT"] == "2"
    assert find_placement(variables).sentence == (
        "JobSet: rank 1 of 3, meeting at demo-worker-0-0.demo:77 (RANK, WORLD_SIZE, MASTER_ADDR, "
        "MASTER_PORT)"
    )


def test_named_workers_are_replicated_jobs() -> None:
    job = job_set(pods(names=["ps", "a:b", "C_d"]))
    check_job_set(job["spec"])
    found = [variables_of(pod_of(job, rank), fields_of(0)) for rank in range(3)]
    assert [each["WEFT_WORKER_NAME"] for each in found] == ["ps", "a:b", "C_d"]
    assert [find_placement(each).rank for each in found] == [0, 1, 2]
    assert {find_placement(each).meeting.place for each in found} == {"demo-rank0-0-0.demo:29500"}
    made = pods(names=["ps", "a:b", "C_d"])
    assert [made.worker_in(pod_at(f"rank{rank}", 0)) for rank in range(3)] == ["ps", "a:b", "C_d"]
    assert pods().worker_in(pod_at("worker", 2)) == "w2"
    assert pods().worker_in(pod_at("worker", 3)) == pods().worker_in(pod_at("worker", "x")) == "pod"


def pod_at(group: str, index: object) -> Object:
    """Returns a pod that was created for a replicated job and an index."""
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": group,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return {"metadata": {"name": "pod", "labels": labels}}


def test_pods_are_confined() -> None:
    pod = pod_of(job_set(pods(user=65534)))
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {65534}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert (pod["restartPolicy"], pod["shareProcessNamespace"]) == ("Never", True)


def test_every_mount_has_its_volume_and_the_worker_no_mounted_secret() -> None:
    pod = pod_of(job_set(pods(tls="certs", shared_memory="2Gi")))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (worker,), (copying,) = pod["containers"], pod["initContainers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    assert {*mounts.values(), "secret"} == volumes.keys()
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert mounts["/dev/shm"] == "shm"
    variables = variables_of(pod, fields_of(0))
    for name, folder in (("WEFT_SECRET_FILE", "/run/weft"), ("WEFT_TLS_KEY", "/etc/weft/tls")):
        assert variables[name].startswith(f"{folder}/")
        assert folder in mounts
    assert "/run/weft" in {mount["mountPath"] for mount in copying["volumeMounts"]}


def test_the_copied_secret_is_one_that_a_worker_takes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import sys

    from torchweft.secret import Secret, write_new

    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    source = tmp_path / "from" / "secret"
    write_new(source)
    source.chmod(0o440)
    program = pod_of(job_set(pods()))["initContainers"][0]["command"][-1]
    moved = program.replace("/etc/weft/secret/", f"{tmp_path}/from/").replace(
        "/run/weft/", f"{tmp_path}/to/"
    )
    subprocess.run([sys.executable, "-c", moved], check=True, timeout=30)
    copied = Secret.from_file(tmp_path / "to" / "secret")
    assert copied.verify(Secret.from_text(source.read_text().strip()).sign(b"x"), b"x")


def test_nothing_is_expanded_in_arguments_and_variables() -> None:
    texts = {"A": "$(WORLD_SIZE)", "B": "$$(RANK) $$ $HOME", "C": "$$$(RANK)"}
    job = job_set(pods(command=["python", "$(RANK) $$"], env=texts))
    (container,) = pod_of(job)["containers"]
    assert container["command"] == ["python", "$$(RANK) $$$$"]
    seen = variables_of(pod_of(job), fields_of(0))
    assert {name: seen[name] for name in texts} == texts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": " "}, "there is no image; name one that has torch"),
        ({"env": {"RANK": "1"}}, "variable RANK is set for each pod"),
        ({"env": {"WEFT_SECRET": "1"}}, "WEFT_SECRET is set for each pod, or from a Sec"),
    ],
)
def test_bad_values(fields: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        pods(**fields)


def test_pods_that_serve_metrics_say_so_to_prometheus() -> None:
    (replicated,) = job_set(pods(metrics=Address("0.0.0.0", 9400)))["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9400",
        "prometheus.io/path": "/metrics",
    }
    (container,) = template["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9400}]
    assert {"name": "WEFT_METRICS", "value": "0.0.0.0:9400"} in container["env"]


def test_metrics_on_loopback_of_a_pod_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"write --metrics 0\.0\.0\.0:9400"):
        pods(metrics=Address("127.0.0.1", 9400))
