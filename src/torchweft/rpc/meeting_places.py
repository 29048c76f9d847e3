"""Where the workers of a launcher meet that sets no ``MASTER_ADDR`` or ``MASTER_PORT``."""

from __future__ import annotations

import itertools
import re
import zlib
from dataclasses import dataclass

from torchweft.errors import ConfigurationError
from torchweft.rpc.launcher_variables import SKYPILOT, SRUN, Launcher, Variables, number

_LOOPBACK = "127.0.0.1"
_FIRST_PORT = 17_000
_PORTS = 15_000
"""Derived ports end below 32,768, where Linux begins to give out ports by itself."""
MOST_HOSTS = 1 << 16
"""Hosts of a list beyond which it is refused."""

_HOST = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Meeting:
    """Where the workers meet, by which init method, and from which variables that is known."""

    host: str = ""
    port: str = ""
    sources: tuple[str, ...] = ()
    method: str = ""

    @property
    def place(self) -> str:
        """Host and port; empty if the host is unknown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.host else ""

    @property
    def init_method(self) -> str:
        """The init method; empty if the host is unknown."""
        return self.method or (f"tcp://{self.place}" if self.host else "")


def derived(launcher: Launcher, size: int, variables: Variables) -> tuple[Meeting, str]:
    """Returns where the workers of a launcher without ``MASTER_ADDR`` meet, or why not."""
    host, missing, sources = _first_host(launcher, size, variables)
    if "MASTER_ADDR" in variables:
        host, missing, sources = variables["MASTER_ADDR"], "", ("MASTER_ADDR",)
    if missing:
        return Meeting(), missing
    if "MASTER_PORT" in variables:
        port = number(variables, "MASTER_PORT")
        return Meeting(host, str(port), (*sources, "MASTER_PORT")), ""
    port, read = _derived_port(launcher, variables)
    if not port:
        return Meeting(), f"{launcher.name} sets no variable that names its job; set MASTER_PORT"
    return Meeting(host, str(port), (*sources, *read)), ""


def _first_host(
    launcher: Launcher, size: int, variables: Variables
) -> tuple[str, str, tuple[str, ...]]:
    """Returns the host of rank 0, or why it is unknown, and the variables that were read."""
    if launcher is SRUN:
        nodes, distribution = "SLURM_STEP_NODELIST", variables.get("SLURM_DISTRIBUTION", "")
        if variables.get("SLURM_STEP_NUM_NODES") == "1":
            return _LOOPBACK, "", ("SLURM_STEP_NUM_NODES",)
        if nodes not in variables or distribution.startswith("arbitrary"):
            return "", f"{nodes} does not tell which node has rank 0; set MASTER_ADDR to it", ()
        return expand(variables[nodes])[0], "", (nodes,)
    if launcher is SKYPILOT:
        if size == 1:
            return _LOOPBACK, "", ()
        return variables["SKYPILOT_NODE_IPS"].split()[0], "", ("SKYPILOT_NODE_IPS",)
    local = launcher.local_size
    if size == 1 or variables.get(local) == str(size):
        return _LOOPBACK, "", (local,) if local in variables else ()
    return (
        "",
        f"{launcher.name} has started workers on several hosts, and its variables do not tell "
        "which host has rank 0; set MASTER_ADDR to that host, the same for all workers (mpirun of "
        "Open MPI: -x MASTER_ADDR=HOST, mpiexec: -genv MASTER_ADDR HOST)",
        (),
    )


def _derived_port(launcher: Launcher, variables: Variables) -> tuple[int, tuple[str, ...]]:
    """Returns a port that the workers of one job agree on, and other jobs probably do not have."""
    if launcher is SRUN and "SLURM_JOB_ID" in variables:
        job, step = number(variables, "SLURM_JOB_ID"), number(variables, "SLURM_STEP_ID")
        return _FIRST_PORT + (job * 17 + step) % _PORTS, ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if launcher is SKYPILOT:
        names: tuple[str, ...] = ("SKYPILOT_TASK_ID", "SKYPILOT_INTERNAL_JOB_ID")
    else:
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT")
    for name in names:
        if name in variables:
            return _FIRST_PORT + zlib.crc32(variables[name].encode()) % _PORTS, (name,)
    return 0, ()


# Lists of hosts


def expand(text: str) -> list[str]:
    """Returns the hosts of a compact list of SLURM, in its order.

    ``n[01-03,7]-gpu,login`` names five hosts; several brackets in a name multiply.

    Raises:
        ConfigurationError: The text is no such list, or names too many hosts.
    """
    patterns = _HOST.findall(text)
    if not patterns or ",".join(patterns) != text:
        raise _malformed(text)
    hosts: list[str] = []
    for pattern in patterns:
        literals, ranges = _BRACKET.split(pattern)[::2], _BRACKET.findall(pattern)
        choices = [_numbers(each, text) for each in ranges]
        for chosen in itertools.product(*choices):
            if len(hosts) == MOST_HOSTS:
                raise ConfigurationError(f"the list of hosts {text!r} names over {MOST_HOSTS}")
            hosts.append("".join(map("".join, zip(literals, (*chosen, ""), strict=True))))
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """Returns the numbers of one bracket, with the leading zeros of each range's start."""
    numbers: list[str] = []
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            raise _malformed(text)
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < MOST_HOSTS:
            raise _malformed(text)
        numbers += [f"{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    return numbers


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is no list of hosts; one looks like n[01-03,7],login")
