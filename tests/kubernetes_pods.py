"""What workers in the pods of a JobSet see, as Kubernetes sets it."""

from __future__ import annotations

import re

from torchweft.launch.kubernetes_manifest import Object


def pod_of(job: Object, number: int = 0) -> Object:
    found: Object = job["spec"]["replicatedJobs"][number]["template"]["spec"]["template"]["spec"]
    return found


def variables_of(pod: Object, fields: dict[str, str]) -> dict[str, str]:
    """Returns the variables that a worker sees, as Kubernetes sets them."""
    values: dict[str, str] = {}
    for variable in pod["containers"][0]["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            values[variable["name"]] = fields[path]
            continue

        def expanded(found: re.Match[str]) -> str:
            return "$" if found[0] == "$$" else values.get(found[1], found[0])

        value = re.sub(r"\$\$|\$\((\w+)\)", expanded, variable["value"])
        values[variable["name"]] = value
    return values


def fields_of(rank: int) -> dict[str, str]:
    return {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(rank),
        "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']": "2",
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "demo",
    }
