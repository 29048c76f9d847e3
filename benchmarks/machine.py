"""Describes the hardware and versions of a result, with nothing that identifies the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine() -> dict[str, str]:
    """Returns processor, GPUs if there are any, usable cores, kernel, Python and torch."""
    return {
        "processor": _processor(),
        **_gpus(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "weft": _own_version(),
    }


def load_of_others() -> int:
    """Returns the number of runnable threads on the whole machine, without this one."""
    running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
    return max(0, int(running) - 1)


def _own_version() -> str:
    try:
        return version("torchweft")
    except PackageNotFoundError:  # on the path, as PYTHONPATH=src
        return "not installed"


def _gpus() -> dict[str, str]:
    models = [
        line.partition(":")[2].strip()
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return {"GPUs": f"{len(models)} {models[0]}"} if models else {}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
