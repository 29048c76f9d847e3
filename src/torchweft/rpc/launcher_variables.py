"""The variables by which launchers tell a process its rank and the size of its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchweft.errors import ConfigurationError

Variables = Mapping[str, str]

MASTER = ("MASTER_ADDR", "MASTER_PORT")
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
PLAIN = Launcher("RANK and WORLD_SIZE", ("RANK",))
LAUNCHERS = (TORCHRUN, WEFT, OPEN_MPI, PMI, SRUN, SKYPILOT)


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
