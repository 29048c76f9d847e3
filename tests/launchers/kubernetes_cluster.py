"""A cluster for tests: kmock's stateful API server, with the few deeds of controllers that matter.

It gives objects their uids, and deletes the objects that belong to a deleted one. A test plays the
JobSet's controller and the nodes by ``put`` and ``change``.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")
kmock = pytest.importorskip("kmock")

Object = dict[str, Any]

NAMESPACE = "team"
JOB_SETS = "jobset.x-k8s.io/v1alpha2/jobsets"
SERVED = (JOB_SETS, "v1/pods", "v1/secrets", "v1/events")


class _Server(kmock.KubernetesEmulator):
    async def _handle(self, request: Any) -> Any:
        action = kmock.action
        if request.action == action.CREATE:
            request.data["metadata"].setdefault("uid", str(uuid.uuid4()))
        key = (request.resource, request.namespace, request.name)
        owner = ""
        if request.action == action.DELETE and key in self.objects:
            owner = self.objects[key].raw["metadata"].get("uid", "")
        answer = await super()._handle(request)
        if owner:
            self._collect(owner)
        return answer

    def _collect(self, owner: str) -> None:
        for key, found in list(self.objects.items()):
            if found.deleted:
                continue
            owners = found.raw["metadata"].get("ownerReferences", [])
            if any(reference["uid"] == owner for reference in owners):
                self.objects[key].delete()


class Cluster:
    """The cluster, from the thread of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kmock")
        self._thread.start()
        self.server: Any = None
        self._listener: Any = None
        self.wait(self._open())

    async def _open(self) -> None:
        self.server = _Server()
        await self.server.__aenter__()
        self._listener = kmock.Server(self.server)
        await self._listener.__aenter__()
        for each in SERVED:
            self.server.resources[each] = {}

    def close(self) -> None:
        async def end() -> None:
            await self._listener.__aexit__(None, None, None)
            await self.server.__aexit__(None, None, None)
            await self._loop.shutdown_asyncgens()

        self.wait(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self, work: Any) -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(20)

    def do(self, work: Callable[[Any], Any]) -> Any:
        """Calls a function with the server, in the server's thread."""

        async def call() -> Any:
            return work(self.server)

        return self.wait(call())

    @property
    def url(self) -> str:
        return str(self._listener.url).rstrip("/")

    def kubeconfig(self, url: str = "") -> str:
        path = self._folder / "kubeconfig"
        path.write_text(
            f"""
apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: c, user: u, namespace: {NAMESPACE}}}}}]
clusters: [{{name: c, cluster: {{server: "{url or self.url}"}}}}]
users: [{{name: u, user: {{token: abc}}}}]
"""
        )
        return str(path)

    def put(self, kind: str, name: str, body: Object) -> None:
        self.do(lambda server: server.objects.__setitem__((kind, NAMESPACE, name), body))

    def change(self, kind: str, name: str, patch: Object) -> None:
        self.do(lambda server: server.objects[kind, NAMESPACE, name].patch(patch))

    def names(self, kind: str) -> list[str]:
        """Returns the names of the objects of a kind that there are."""

        def look(server: Any) -> list[str]:
            wanted = kmock.resource(kind)
            return [
                name
                for (resource, _, name), found in server.objects.items()
                if resource == wanted and not found.deleted
            ]

        return list(self.do(look))

    def get(self, kind: str, name: str) -> Object:
        found: Object = self.do(lambda server: server.objects[kind, NAMESPACE, name].raw)
        return found

    def log(self, pod: str, *content: object) -> None:
        """Sets what the log of a pod streams."""
        path = f"get /api/v1/namespaces/{NAMESPACE}/pods/{pod}/log"

        def set_it(server: Any) -> None:
            server[path] << content

        self.do(set_it)

    def pod(self, job: Object, rank: int, status: Object) -> str:
        """Creates a worker's pod of a JobSet."""
        name = f"{job['metadata']['name']}-worker-0-{rank}-x{rank}"
        marks = {
            "jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"],
            "jobset.sigs.k8s.io/replicatedjob-name": "worker",
            "batch.kubernetes.io/job-completion-index": str(rank),
        }
        reference = {"uid": job["metadata"]["uid"], "kind": "JobSet", "name": "x"}
        meta = {"name": name, "uid": f"u{rank}", "labels": marks, "ownerReferences": [reference]}
        self.put("v1/pods", name, {"metadata": meta, "spec": {}, "status": status})
        return name


def running() -> Object:
    return {"phase": "Running", "containerStatuses": [_container({"running": {}})]}


def terminated(code: int, moment: str = "2026-01-01T00:00:00Z", reason: str = "Error") -> Object:
    state = {"exitCode": code, "finishedAt": moment, "reason": reason}
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "containerStatuses": [_container({"terminated": state})]}


def waiting(reason: str, message: str) -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [_container(state)]}


def _container(state: Object) -> Object:
    return {"name": "node", "image": "r/train:1", "state": state}


def ended(kind: str) -> Object:
    return {"status": {"conditions": [{"type": kind, "status": "True"}]}}


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.close()
