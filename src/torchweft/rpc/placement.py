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

from dataclasses import dataclass, field

from torchweft.errors import ConfigurationError
from torchweft.rpc.launcher_variables import (
    LAUNCHERS,
    MASTER,
    PLAIN,
    PMI,
    SKYPILOT,
    SRUN,
    Launcher,
    Variables,
    name_of,
    number,
)
from torchweft.rpc.meeting_places import Meeting, derived

_BY_HAND = "start the script with 'torchweft run', 'torchrun', 'srun' or 'mpirun'"


@dataclass(frozen=True)
class Placement:
    """The place of a process in its group.

    Attributes:
        launcher: Name of the launcher, for messages; empty if none was found.
        rank: The rank; None if unknown.
        world_size: Number of workers; None if unknown, or if the group is open.
        local_rank: Number among the workers of this host; None if unknown.
        local_world_size: Number of workers on this host; None if unknown.
        init_method: How the workers meet; empty if unknown.
        meeting: Host and port where they meet; empty if unknown.
        missing: Why a value is unknown, and how to give it; for errors.
        sources: The variables that were read.
    """

    launcher: str = ""
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str = ""
    meeting: str = ""
    missing: str = ""
    sources: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sentence(self) -> str:
        """The finding in one line, for the log; empty if no launcher was found."""
        if not self.launcher or self.rank is None:
            return ""
        size = "an open group" if self.world_size is None else str(self.world_size)
        where = f", meeting at {self.meeting}" if self.meeting else ""
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
    if launcher is not None and launcher.is_innermost:
        return _place(launcher, variables)
    if "RANK" in variables:
        if launcher is not None and _agrees(launcher, variables):
            return _place(launcher, variables)
        _check_container(variables)
        return _place(PLAIN, variables)
    if launcher is not None:
        return _place(launcher, variables)
    if "PET_NODE_RANK" in variables:
        return _of_container(variables)
    size = number(variables, "WORLD_SIZE") if "WORLD_SIZE" in variables else None
    return Placement(world_size=size, missing=_hint(variables))


def _place(launcher: Launcher, variables: Variables) -> Placement:
    """Returns the place that one launcher's variables describe."""
    if launcher is PMI and SRUN.is_present(variables) and _are_equal(PMI, SRUN, variables):
        launcher = SRUN
    rank = number(variables, launcher.rank)
    size = number(variables, launcher.size) if launcher.size in variables else None
    _check_range(launcher.rank, rank, launcher.size, size)
    _check_addresses(launcher, size, variables)
    if launcher.rank != "RANK" and "WORLD_SIZE" in variables:
        _check_size(launcher, size, variables)
    sources = [launcher.rank, *([launcher.size] if size is not None else [])]
    meeting, missing = Meeting(), ""
    if all(name in variables for name in MASTER):
        # PyTorch reads more variables for this method, such as those of torchrun.
        meeting = Meeting(variables["MASTER_ADDR"], variables["MASTER_PORT"], MASTER, "env://")
    elif launcher.rank != "RANK":
        meeting, missing = derived(launcher, size or 1, variables)
    local_rank, local_size = (
        number(variables, name) if name in variables else None
        for name in (launcher.local_rank, launcher.local_size)
    )
    return Placement(
        name_of(launcher, variables),
        rank,
        size,
        local_rank,
        local_size,
        meeting.init_method,
        meeting.place,
        missing,
        (*sources, *meeting.sources),
    )


def _are_equal(one: Launcher, other: Launcher, variables: Variables) -> bool:
    pairs = ((one.rank, other.rank), (one.size, other.size))
    return all(variables[first] == variables[second] for first, second in pairs)


# Contradictions


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
        _check_size(launcher, tasks, variables)
    return True


def _check_range(rank_name: str, rank: int, size_name: str, size: int | None) -> None:
    if size is not None and rank >= size:
        raise ConfigurationError(
            f"environment variable {rank_name} is {rank}, but {size_name} is {size}: ranks go from "
            f"0 to {size - 1}; correct or unset both"
        )


def _check_size(launcher: Launcher, tasks: int | None, variables: Variables) -> None:
    size = number(variables, "WORLD_SIZE")
    if size != tasks:
        raise ConfigurationError(
            f"environment variable WORLD_SIZE is {size}, but {launcher.size} of {launcher.name} is "
            f"{tasks}; unset WORLD_SIZE, or start {size} tasks"
        )


def _check_addresses(launcher: Launcher, size: int | None, variables: Variables) -> None:
    """Raises ConfigurationError if SkyPilot lists more or fewer addresses than nodes."""
    if launcher is not SKYPILOT:
        return
    addresses = len(variables["SKYPILOT_NODE_IPS"].split())
    if addresses != size:
        raise ConfigurationError(
            f"environment variable SKYPILOT_NODE_IPS lists {addresses} addresses, but "
            f"{launcher.size} is {size}; unset the SKYPILOT_ variables that do not belong to this "
            "task, or start it with 'torchrun'"
        )


def _check_container(variables: Variables) -> None:
    """Raises ConfigurationError if a container is to hold several workers, but starts one."""
    each = variables.get("PET_NPROC_PER_NODE", "")
    if each.isdigit() and int(each) > 1 and "LOCAL_RANK" not in variables:
        raise ConfigurationError(
            f"environment variable PET_NPROC_PER_NODE asks for {each} workers in each container, "
            "but the script was started once; start it with 'torchrun' and no options, which reads "
            "the PET_ variables"
        )
    for name in MASTER:
        theirs = f"PET_{name}"
        if name in variables and variables.get(theirs, variables[name]) != variables[name]:
            raise ConfigurationError(
                f"environment variable {name} is {variables[name]!r}, but {theirs} is "
                f"{variables[theirs]!r}; unset one of them"
            )
    if "LOCAL_RANK" not in variables:
        _check_pair("RANK", "PET_NODE_RANK", variables)
        _check_pair("WORLD_SIZE", "PET_NNODES", variables)


def _check_pair(ours: str, theirs: str, variables: Variables) -> None:
    """Raises ConfigurationError if a container's number differs from that of its system."""
    if ours not in variables or not variables.get(theirs, "").isdigit():  # PET_NNODES may be 1:4
        return
    if number(variables, ours) != number(variables, theirs):
        raise ConfigurationError(
            f"environment variable {ours} is {variables[ours]}, but {theirs} is "
            f"{variables[theirs]}; unset {ours}, which this system sets for each container"
        )


def _of_container(variables: Variables) -> Placement:
    """Returns the place of a container of Kubeflow Trainer, whose variables are for torchrun."""
    _check_container(variables)
    sources = ["PET_NODE_RANK", "PET_NNODES"]
    nodes = variables.get("PET_NNODES", "1")
    least, _, most = nodes.partition(":")
    if most not in ("", least):
        raise ConfigurationError(
            f"environment variable PET_NNODES is {nodes!r}, a number that may change; start the "
            "script with 'torchrun' and no options, which reads the PET_ variables"
        )
    size = number({"PET_NNODES": least}, "PET_NNODES")
    rank = number(variables, "PET_NODE_RANK")
    _check_range("PET_NODE_RANK", rank, "PET_NNODES", size)
    read = [f"PET_{name}" if f"PET_{name}" in variables else name for name in MASTER]
    host, port = (variables.get(name, "") for name in read)
    meeting = Meeting(host, port, tuple(read)) if host and port else Meeting()
    missing = "" if meeting.host else f"set {' and '.join(read)}, where rank 0 is reached"
    return Placement(
        "Kubeflow",
        rank,
        size,
        0,
        1,
        meeting.init_method,
        meeting.place,
        missing,
        (*sources, *meeting.sources),
    )


def _hint(variables: Variables) -> str:
    """Returns why there is no rank although a launcher is near; or general advice."""
    if "SLURM_JOB_ID" in variables:
        return (
            f"start the script with srun, as srun did not start this process of SLURM job "
            f"{variables['SLURM_JOB_ID']}: write 'srun python SCRIPT'"
        )
    if "PMIX_RANK" in variables:
        return (
            "set RANK=$PMIX_RANK and WORLD_SIZE in each process: PMIx has a rank for it, but no "
            "variable with the number of processes"
        )
    if "JOB_COMPLETION_INDEX" in variables:
        return (
            "set RANK=$JOB_COMPLETION_INDEX, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each pod: "
            "an indexed Job of Kubernetes tells a pod neither their number nor where to meet; "
            "'torchweft manifest' writes a JobSet that does"
        )
    return _BY_HAND
