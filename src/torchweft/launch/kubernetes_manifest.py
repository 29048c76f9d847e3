"""The objects of a run on Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer.

Each worker is a pod. The functions here only make dictionaries: they need no client and no
cluster. Decisions that a reader of the output will wonder about:

- A mounted Secret belongs to root, and users other than root read it through the pod's group. Weft
  refuses a secret that a group can read. So an init container copies it into a file in memory that
  belongs to the worker's user.
- A pod is ready once its worker has joined the group. Its liveness does not depend on that: a
  program may work before it joins and after it has left. A worker that is a member must answer.
- Pods get no links to services. Services called ``weft-...`` would become ``WEFT_...`` variables,
  which workers refuse.
- Kubernetes expands ``$(NAME)`` in commands and variables, and makes ``$`` of ``$$`` anywhere in
  them, so each ``$`` is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchweft.arguments import did_you_mean
from torchweft.errors import ConfigurationError
from torchweft.launch.kubernetes_pods import Pods
from torchweft.scraping import VARIABLE

Object = dict[str, Any]

JOB_SET = "jobset"
TRAIN_JOB = "trainjob"
KINDS = (JOB_SET, TRAIN_JOB)

JOB_SET_GROUP, JOB_SET_VERSION = "jobset.x-k8s.io", "v1alpha2"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"
"""Name of the workers' containers; Kubeflow Trainer asks for this one."""
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
GROUP_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SECRET_KEY = "secret"

_RESTARTS = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_INDEX = f"metadata.annotations['{INDEX_LABEL}']"
_MASTER_PORT = 29500
_KEPT_S = 3600
_SECRET_SOURCE = "/etc/weft/secret"
_SECRET_FOLDER = "/run/weft"
_TLS_FOLDER = "/etc/weft/tls"
_COPY = (
    "import os, shutil; os.umask(0o077); "
    f"shutil.copyfile('{_SECRET_SOURCE}/{SECRET_KEY}', '{_SECRET_FOLDER}/{SECRET_KEY}')"
)


def documents(kind: str, pods: Pods) -> list[Object]:
    """Returns the objects of a run, without the Secret.

    Args:
        kind: ``jobset`` or ``trainjob``.
        pods: The workers.

    Raises:
        ConfigurationError: There is no such kind, or it does not offer what is wanted.
    """
    if kind == JOB_SET:
        return [job_set(pods)]
    if kind == TRAIN_JOB:
        return train_job(pods)
    raise ConfigurationError(
        f"there is no kind {kind!r}{did_you_mean(kind, KINDS)}; there are {', '.join(KINDS)}"
    )


def as_yaml(objects: Sequence[Object]) -> str:
    """Returns objects as YAML.

    Raises:
        ConfigurationError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            "YAML needs PyYAML; install it by: pip install 'torchweft[kubernetes]'"
        ) from None

    class Plain(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            return True

    return str(yaml.dump_all(objects, Dumper=Plain, sort_keys=False, width=100))


def job_set(pods: Pods) -> Object:
    """Returns the JobSet of a run."""
    port = pods.master_port or _MASTER_PORT
    first = "worker" if pods.names is None else "rank0"
    common = [
        *_of_job_set(),
        _variable("WORLD_SIZE", str(pods.workers)),
        _variable("MASTER_ADDR", f"{pods.name}-{first}-0-0.{pods.name}"),
        _variable("MASTER_PORT", str(port)),
    ]
    if pods.names is None:
        ranked = [_from_field("RANK", _INDEX), _variable("WEFT_WORKER_NAME", _prefixed(pods))]
        groups = [_replicated("worker", pods.workers, _template(pods, [*ranked, *common]))]
    else:
        groups = [
            _replicated(
                f"rank{rank}",
                1,
                _template(
                    pods,
                    [
                        _variable("RANK", str(rank)),
                        _variable("WEFT_WORKER_NAME", name),
                        *common,
                    ],
                ),
            )
            for rank, name in enumerate(pods.names)
        ]
    return {
        "apiVersion": f"{JOB_SET_GROUP}/{JOB_SET_VERSION}",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": {**_policies(pods), "ttlSecondsAfterFinished": _KEPT_S, "replicatedJobs": groups},
    }


def train_job(pods: Pods) -> list[Object]:
    """Returns a TrainingRuntime with the pods of a run, and the TrainJob that uses it.

    The runtime is the one place for volumes, probes and the security context in all versions of
    Kubeflow Trainer: the field of TrainJob that overrides a runtime has changed its name.
    """
    if pods.names is not None:
        raise ConfigurationError(
            "a TrainJob numbers its workers; use --name-prefix in place of --names, or --kind "
            "jobset"
        )
    if pods.master_port:
        raise ConfigurationError("a TrainJob chooses the port itself; leave --master-port out")
    named = [
        _from_field("WORKER_INDEX", _INDEX),
        # Kubernetes expands only variables that are defined before.
        _variable("WEFT_WORKER_NAME", _prefixed(pods, "WORKER_INDEX")),
        *_of_job_set(),
    ]
    job = _replicated(CONTAINER, pods.workers, _template(pods, named))
    job["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    runtime = {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": _metadata(pods),
        "spec": {
            "mlPolicy": {"numNodes": pods.workers, "torch": {"numProcPerNode": 1}},
            "template": {"spec": {**_policies(pods), "replicatedJobs": [job]}},
        },
    }
    training = {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": {
            "runtimeRef": {
                "apiGroup": TRAINER_API.partition("/")[0],
                "kind": "TrainingRuntime",
                "name": pods.name,
            },
            # Without this part, Kubeflow sets no PET_ variables.
            "trainer": {"numNodes": pods.workers, "numProcPerNode": 1},
        },
    }
    return [runtime, training]


def secret_of(pods: Pods, owner: Object, value: str) -> Object:
    """Returns the Secret of a run, which is deleted with the object that owns it."""
    meta = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            **_metadata(pods),
            "name": pods.secret_name,
            "ownerReferences": [reference],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {SECRET_KEY: value},
    }


# Parts


def _metadata(pods: Pods) -> Object:
    labels = {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/managed-by": "torchweft"}
    namespace = {"namespace": pods.namespace} if pods.namespace else {}
    return {"name": pods.name, **namespace, "labels": labels}


def _policies(pods: Pods) -> Object:
    return {
        # Workers find each other before they are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts},
    }


def _replicated(name: str, count: int, template: Object) -> Object:
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "parallelism": count,
                "completions": count,
                # A worker does not start again alone: the JobSet starts the group again.
                "backoffLimit": 0,
                "template": template,
            }
        },
    }


def _template(pods: Pods, identity: list[Object]) -> Object:
    template = {"spec": _pod(pods, identity)}
    if pods.metrics is None:
        return template
    # Read by the usual configurations of Prometheus; the operator of Prometheus takes a PodMonitor
    # that names the port.
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(pods.metrics.port),
        "prometheus.io/path": "/metrics",
    }
    return {"metadata": {"annotations": annotations}, **template}


def _pod(pods: Pods, identity: list[Object]) -> Object:
    return {
        "restartPolicy": "Never",
        # Otherwise the worker is process 1, which ignores SIGTERM.
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": pods.user,
            "runAsGroup": pods.user,
            "fsGroup": pods.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": _volumes(pods),
        "initContainers": [_copying(pods)],
        "containers": [_container(pods, identity)],
    }


def _volumes(pods: Pods) -> list[Object]:
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "secret-copy", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {
            "name": "secret",
            "secret": {
                "secretName": pods.secret_name,
                "defaultMode": 0o440,
                "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
            },
        },
    ]
    if pods.tls:
        volumes.append({"name": "tls", "secret": {"secretName": pods.tls, "defaultMode": 0o440}})
    return volumes


def _confined() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _copying(pods: Pods) -> Object:
    return {
        "name": "secret",
        "image": pods.image,
        "command": [pods.python, "-c", _COPY],
        "securityContext": _confined(),
        "resources": _resources(pods, with_gpus=False),
        "volumeMounts": [
            _mount("secret", _SECRET_SOURCE, is_read_only=True),
            _mount("secret-copy", _SECRET_FOLDER),
        ],
    }


def _container(pods: Pods, identity: list[Object]) -> Object:
    mounts = [
        _mount("shm", "/dev/shm"),
        _mount("tmp", "/tmp"),
        _mount("secret-copy", _SECRET_FOLDER, is_read_only=True),
    ]
    if pods.tls:
        mounts.append(_mount("tls", _TLS_FOLDER, is_read_only=True))
    ports = {}
    if pods.metrics is not None:
        ports = {"ports": [{"name": "metrics", "containerPort": pods.metrics.port}]}
    return {
        "name": CONTAINER,
        "image": pods.image,
        "command": [_literal(part) for part in pods.command],
        **ports,
        "env": [*identity, *_surroundings(pods)],
        "resources": _resources(pods),
        "securityContext": _confined(),
        "readinessProbe": _probe(pods, "--joined", period_s=10, failures=3),
        "livenessProbe": _probe(pods, period_s=30, failures=10),
        "volumeMounts": mounts,
    }


def _probe(pods: Pods, *options: str, period_s: int, failures: int) -> Object:
    return {
        "exec": {"command": [pods.python, "-m", "torchweft", "probe", *options]},
        "periodSeconds": period_s,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


def _resources(pods: Pods, *, with_gpus: bool = True) -> Object:
    amounts = {"cpu": pods.cpus, "memory": pods.memory}
    wanted = {name: amount for name, amount in amounts.items() if amount}
    if pods.gpus and with_gpus:
        wanted["nvidia.com/gpu"] = str(pods.gpus)
    return {"requests": wanted, "limits": dict(wanted)} if wanted else {}


def _surroundings(pods: Pods) -> list[Object]:
    """Returns the variables that are the same for all workers."""
    variables = {
        "WEFT_SECRET_FILE": f"{_SECRET_FOLDER}/{SECRET_KEY}",
        # Nodes may have to be made, and the image to be loaded.
        "WEFT_INIT_TIMEOUT_S": "600",
        "PYTHONUNBUFFERED": "1",
        # The user may be unknown in the image, and the root file system cannot be written.
        "HOME": "/tmp",
        "USER": "weft",
    }
    if pods.tls:
        variables |= {
            "WEFT_TLS_CERT": f"{_TLS_FOLDER}/tls.crt",
            "WEFT_TLS_KEY": f"{_TLS_FOLDER}/tls.key",
            "WEFT_TLS_CA": f"{_TLS_FOLDER}/ca.crt",
        }
    if pods.metrics is not None:
        variables[VARIABLE] = str(pods.metrics)
    if pods.cpus:
        # Otherwise as many threads as the node has cores.
        cores = float(pods.cpus[:-1]) / 1000 if pods.cpus.endswith("m") else float(pods.cpus)
        variables["OMP_NUM_THREADS"] = str(max(1, math.floor(cores)))
    variables |= pods.environment
    return [_variable(name, _literal(value)) for name, value in variables.items()]


def _of_job_set() -> list[Object]:
    name = _from_field("JOBSET_NAME", f"metadata.labels['{NAME_LABEL}']")
    return [name, _from_field("WEFT_RESTART_COUNT", _RESTARTS)]


def _prefixed(pods: Pods, index: str = "RANK") -> str:
    return f"{pods.name_prefix}$({index})"


def _variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _literal(text: str) -> str:
    return text.replace("$", "$$")


def _mount(name: str, path: str, *, is_read_only: bool = False) -> Object:
    mount: Object = {"name": name, "mountPath": path}
    return mount | {"readOnly": True} if is_read_only else mount
