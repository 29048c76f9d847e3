"""Finds this process's place in its group, from the variables that its launcher has set.

Launchers nest: ``srun`` may start ``torchrun`` on each node, and ``mpirun`` may start its daemons
by ``srun``. The innermost launcher counts, as it numbers the processes; the variables of the outer
ones are inherited. The rules of this file:

- ``find`` is a function of the variables only. It neither reads the environment nor looks up names.
- Each launcher is a row of ``launcher_variables``, from those inside of others to the outermost.
- ``RANK`` and ``WORLD_SIZE`` by hand, or from a container platform, count before a launcher's own
  variables only if both agree. A batch script that exports ``RANK=0`` for all tasks is refused.
- A missing rendezvous is an error only for a program that needs one, so it is kept as text.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchweft.errors import ConfigurationError

Variables = Mapping[str, str]

MASTER = ("MASTER_ADDR", "MASTER_PORT")
_MASTER_OF_CONTAINERS = ("PET_MASTER_ADDR", "PET_MASTER_PORT")
_LAST_STEP = 0xFFFFFFF0
"""SLURM's steps from here on are no steps that ``srun`` started: batch, interactive, and so on."""


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher.

    Attributes:
        name: Its name, for messages.
        marks: Variables that are all set if, and only if, this launcher started the process.
        is_innermost: Whether it sets ``RANK`` itself, for each process.
    """

    name: str
    marks: tuple[str, ...]
    rank: str = "RANK"
    size: str = "WORLD_SIZE"
    local_rank: str = "LOCAL_RANK"
    local_size: str = "LOCAL_WORLD_SIZE"
    is_innermost: bool = False

    def is_present(self, variables: Variables) -> bool:
        """Whether this launcher has started the process, or one around it."""
        if not all(mark in variables for mark in self.marks):
            return False
        if self is KUBEFLOW:
            return variables["PET_NNODES"].isdigit()
        return self is not SRUN or _is_step(variables)


WEFT = Launcher("torchweft run", ("RANK", "WEFT_RESTART_COUNT"), is_innermost=True)
TORCHRUN = Launcher("torchrun", ("RANK", "TORCHELASTIC_RUN_ID"), is_innermost=True)
OPEN_MPI = Launcher(
    "mpirun of Open MPI",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
SRUN = Launcher(
    "srun",
    ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "",
)
# A process that srun starts with --mpi=pmi2 has these as well; mpiexec inside of a step hides it.
PMI = Launcher(
    "mpiexec (PMI)",
    ("PMI_RANK", "PMI_SIZE"),
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
# The command of a task runs once on each node; it may start the other launchers.
SKYPILOT = Launcher(
    "SkyPilot",
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NUM_NODES",
    "",
    "",
)
# One worker in each container; torchrun reads these variables and sets RANK for several.
KUBEFLOW = Launcher(
    "Kubeflow", ("PET_NODE_RANK", "PET_NNODES"), "PET_NODE_RANK", "PET_NNODES", "", ""
)
PLAIN = Launcher("RANK and WORLD_SIZE", ("RANK",))
LAUNCHERS = (TORCHRUN, WEFT, OPEN_MPI, PMI, SRUN, SKYPILOT, KUBEFLOW)


_CONTAINERS = {"JOBSET_NAME": "JobSet", "PET_NODE_RANK": "PyTorchJob"}
"""Variables of systems that set ``RANK`` for each container, with the names of the systems."""


def name_of(launcher: Launcher, variables: Variables) -> str:
    """Returns the name of a launcher for messages."""
    if launcher not in (WEFT, PLAIN):
        return launcher.name
    if "LOCAL_RANK" in variables:  # started within the container
        return launcher.name
    return next((name for mark, name in _CONTAINERS.items() if mark in variables), launcher.name)


def _is_step(variables: Variables) -> bool:
    step = variables["SLURM_STEP_ID"]
    return step.isdigit() and int(step) < _LAST_STEP


def number(variables: Variables, name: str) -> int:
    """Returns a variable's value; raises ConfigurationError if it is no number from 0 on."""
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"environment variable {name} is {text!r}, which is no number")
    return int(text)


_LOOPBACK = "127.0.0.1"
_FIRST_PORT = 17_000
_PORTS = 15_000
"""Derived ports end below 32,768, where Linux begins to give out ports by itself."""
_RANGES = r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = re.compile(rf"((?:[^\[\],]|{_RANGES})+)(?:,(?:[^\[\],]|{_RANGES})+)*")
"""A compact list of SLURM, like ``n[01-03,7]-gpu,login``; its first group has the first host."""


@dataclass(frozen=True)
class Meeting:
    """Where the workers meet, by which init method, and from which variables that is known."""

    host: str = ""
    port: str = ""
    sources: tuple[str, ...] = ()
    method: str = ""
    missing: str = ""
    """Why the place is unknown, and how to give it; for errors."""

    @property
    def place(self) -> str:
        """Host and port; empty if the host is unknown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.host else ""

    @property
    def init_method(self) -> str:
        """The init method; empty if the host is unknown."""
        return self.method or (f"tcp://{self.place}" if self.host else "")


def derived(launcher: Launcher, size: int, variables: Variables) -> Meeting:
    """Returns where the workers of a launcher meet that may not set ``MASTER_ADDR``."""
    found = _first_host(launcher, size, variables)
    if "MASTER_ADDR" in variables:
        found = Meeting(variables["MASTER_ADDR"], sources=("MASTER_ADDR",))
    if found.missing:
        return found
    read: tuple[str, ...]
    if "MASTER_PORT" in variables:
        port, read = number(variables, "MASTER_PORT"), MASTER[1:]
    else:
        port, read = _derived_port(launcher, variables)
    if not read:
        missing = f"{launcher.name} sets no variable that names its job; set MASTER_PORT"
        return Meeting(missing=missing)
    return Meeting(found.host, str(port), (*found.sources, *read))


def _first_host(launcher: Launcher, size: int, variables: Variables) -> Meeting:
    """Returns the host of rank 0, without a port."""
    if launcher is SRUN:
        nodes, distribution = "SLURM_STEP_NODELIST", variables.get("SLURM_DISTRIBUTION", "")
        if variables.get("SLURM_STEP_NUM_NODES") == "1":
            return Meeting(_LOOPBACK, sources=("SLURM_STEP_NUM_NODES",))
        if nodes not in variables or distribution.startswith("arbitrary"):
            missing = f"{nodes} does not tell which node has rank 0; set MASTER_ADDR to it"
            return Meeting(missing=missing)
        return Meeting(first_of(variables[nodes]), sources=(nodes,))
    if launcher is SKYPILOT:
        if size == 1:
            return Meeting(_LOOPBACK)
        return Meeting(variables["SKYPILOT_NODE_IPS"].split()[0], sources=("SKYPILOT_NODE_IPS",))
    if launcher is KUBEFLOW:
        if not all(name in variables for name in _MASTER_OF_CONTAINERS):
            return Meeting(missing="set MASTER_ADDR and MASTER_PORT, where rank 0 is reached")
        return Meeting(variables["PET_MASTER_ADDR"], sources=_MASTER_OF_CONTAINERS[:1])
    local = launcher.local_size
    if size == 1 or variables.get(local) == str(size):
        return Meeting(_LOOPBACK, sources=(local,) if local in variables else ())
    return Meeting(
        missing=f"{launcher.name} has started workers on several hosts, and its variables do not "
        "tell which host has rank 0; set MASTER_ADDR to that host, the same for all workers "
        "(mpirun of Open MPI: -x MASTER_ADDR=HOST, mpiexec: -genv MASTER_ADDR HOST)"
    )


def _derived_port(launcher: Launcher, variables: Variables) -> tuple[int, tuple[str, ...]]:
    """Returns a port that the workers of one job agree on, and other jobs probably do not have."""
    if launcher is SRUN and "SLURM_JOB_ID" in variables:
        job, step = number(variables, "SLURM_JOB_ID"), number(variables, "SLURM_STEP_ID")
        return _FIRST_PORT + (job * 17 + step) % _PORTS, ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if launcher is KUBEFLOW and "PET_MASTER_PORT" in variables:
        return number(variables, "PET_MASTER_PORT"), _MASTER_OF_CONTAINERS[1:]
    if launcher is SKYPILOT:
        names: tuple[str, ...] = ("SKYPILOT_TASK_ID", "SKYPILOT_INTERNAL_JOB_ID")
    else:
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT")
    for name in names:
        if name in variables:
            return _FIRST_PORT + zlib.crc32(variables[name].encode()) % _PORTS, (name,)
    return 0, ()


def first_of(text: str) -> str:
    """Returns the first host of a compact list of SLURM: ``n01-gpu`` of ``n[01-03,7]-gpu,login``.

    Raises:
        ConfigurationError: The text is no such list.
    """
    found = _HOSTS.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is no list of hosts; one looks like n[01-03,7],login")
    return re.sub(_RANGES, r"\1", found[1])


@dataclass(frozen=True)
class Placement:
    """The place of a process in its group.

    Attributes:
        launcher: Name of the launcher, for messages; empty if none was found.
        rank: The rank; None if unknown.
        world_size: Number of workers; None if unknown, or if the group is open.
        local_rank: Number among the workers of this host; None if unknown.
        local_world_size: Number of workers on this host; None if unknown.
        meeting: Where the workers meet, or why that, or the rank, is unknown.
        sources: The variables that were read.
    """

    launcher: str = ""
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    meeting: Meeting = Meeting()
    sources: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sentence(self) -> str:
        """The finding in one line, for the log; empty if no launcher was found."""
        if not self.launcher or self.rank is None:
            return ""
        size = "an open group" if self.world_size is None else str(self.world_size)
        where = f", meeting at {self.meeting.place}" if self.meeting.host else ""
        return f"{self.launcher}: rank {self.rank} of {size}{where} ({', '.join(self.sources)})"

    @property
    def variables(self) -> dict[str, str]:
        """Rank and size in the variables that ``torchrun`` would set; empty without a rank."""
        values = {"RANK": self.rank, "WORLD_SIZE": self.world_size}
        if None not in (self.local_rank, self.local_world_size):
            values |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_world_size}
        return {name: str(value) for name, value in values.items() if value is not None}


def find(variables: Variables) -> Placement:
    """Returns the place that the environment variables of a launcher describe.

    Args:
        variables: Environment variables by name.

    Returns:
        The place; one without a rank if no launcher has set any.

    Raises:
        ConfigurationError: Variables contradict each other, or cannot be read; names them.
    """
    launcher = next((each for each in LAUNCHERS if each.is_present(variables)), None)
    if launcher is None and "RANK" not in variables:
        size = number(variables, "WORLD_SIZE") if "WORLD_SIZE" in variables else None
        return Placement(world_size=size, meeting=Meeting(missing=_hint(variables)))
    if launcher is None:
        return _place(PLAIN, variables)
    is_plain = (
        "RANK" in variables
        and not launcher.is_innermost
        # A platform sets both for its containers, and ``name_of`` knows its name.
        and (not _agrees(launcher, variables) or launcher is KUBEFLOW)
    )
    return _place(PLAIN if is_plain else launcher, variables)


def _place(launcher: Launcher, variables: Variables) -> Placement:
    """Returns the place that one launcher's variables describe."""
    if launcher is PMI and SRUN.is_present(variables) and _are_equal(PMI, SRUN, variables):
        launcher = SRUN
    rank = number(variables, launcher.rank)
    size = number(variables, launcher.size) if launcher.size in variables else None
    if size is not None and rank >= size:
        raise ConfigurationError(
            f"environment variable {launcher.rank} is {rank}, but {launcher.size} is {size}: "
            f"ranks go from 0 to {size - 1}; correct or unset both"
        )
    if launcher.rank != "RANK" and "WORLD_SIZE" in variables:
        _check_size(launcher, variables)
    meeting = Meeting()
    if all(name in variables for name in MASTER):
        # PyTorch reads more variables for this method, such as those of torchrun.
        meeting = Meeting(variables["MASTER_ADDR"], variables["MASTER_PORT"], MASTER, "env://")
    elif launcher.rank != "RANK":
        meeting = derived(launcher, size or 1, variables)
    local_rank, local_size = (
        number(variables, name) if name in variables else None
        for name in (launcher.local_rank, launcher.local_size)
    )
    read = (launcher.rank, *([launcher.size] if size is not None else []), *meeting.sources)
    name = name_of(launcher, variables)
    return Placement(name, rank, size, local_rank, local_size, meeting, read)


def _are_equal(one: Launcher, other: Launcher, variables: Variables) -> bool:
    pairs = ((one.rank, other.rank), (one.size, other.size))
    return all(variables[first] == variables[second] for first, second in pairs)


def _agrees(launcher: Launcher, variables: Variables) -> bool:
    """Whether ``RANK`` and ``WORLD_SIZE`` say the same as a launcher's own variables.

    They need not if the program itself starts several processes in each task. It then tells them a
    local rank, and there are more processes than tasks. A step of one task may be a shell.

    Raises:
        ConfigurationError: They contradict the launcher.
    """
    tasks = number(variables, launcher.size)
    rank, size = number(variables, "RANK"), variables.get("WORLD_SIZE", "")
    is_nested = "LOCAL_RANK" in variables and size.isdigit() and int(size) > tasks
    if is_nested or tasks == 1:
        return False
    if rank != number(variables, launcher.rank):
        raise ConfigurationError(
            f"environment variable RANK is {rank}, but {launcher.rank} of {launcher.name} is "
            f"{variables[launcher.rank]}; unset RANK and WORLD_SIZE (a batch script may export "
            f"them), or set RANK=${launcher.rank} in each task"
        )
    if size:
        _check_size(launcher, variables)
    return True


def _check_size(launcher: Launcher, variables: Variables) -> None:
    size, tasks = number(variables, "WORLD_SIZE"), number(variables, launcher.size)
    if size != tasks:
        raise ConfigurationError(
            f"environment variable WORLD_SIZE is {size}, but {launcher.size} of {launcher.name} is "
            f"{tasks}; unset WORLD_SIZE, or start {size} tasks"
        )


_HINTS = {
    "SLURM_JOB_ID": "start the script with srun, as srun did not start this process of SLURM job "
    "{}: write 'srun python SCRIPT'",
    "PMIX_RANK": "set RANK=$PMIX_RANK and WORLD_SIZE in each process: PMIx has a rank for it, but "
    "no variable with the number of processes",
    "PET_NNODES": "start the script with 'torchrun' and no options, which reads the PET_ "
    "variables: PET_NNODES is {}, a number that may change",
    "JOB_COMPLETION_INDEX": "set RANK=$JOB_COMPLETION_INDEX, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT in each pod: an indexed Job of Kubernetes tells a pod neither their number nor "
    "where to meet; 'torchweft manifest' writes a JobSet that does",
}
"""Why there is no rank although a launcher is near, by a variable of that launcher."""


def _hint(variables: Variables) -> str:
    """Returns why there is no rank, and how to give it."""
    for name, hint in _HINTS.items():
        if name in variables:
            return hint.format(variables[name])
    return "start the script with 'torchweft run', 'torchrun', 'srun' or 'mpirun'"
