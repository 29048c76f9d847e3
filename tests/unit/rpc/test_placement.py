"""Places by the variables that each launcher really sets, and what contradicts what.

The variables were printed by the launchers: SLURM 22.05, Open MPI 4.1, torchrun of torch 2.13.
Those of PyTorchJob, Kubeflow, JobSet, SkyPilot and Hydra (MPICH) were not tried with these systems.
"""

from __future__ import annotations

import re
import zlib

import pytest

from torchweft.errors import ConfigurationError
from torchweft.rpc.options import find_placement

Variables = dict[str, str]

JOB = {
    "SLURM_JOB_ID": "4021",
    "SLURM_JOBID": "4021",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_NODELIST": "n[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_SUBMIT_HOST": "login",
}
SALLOC = JOB
BATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
STEP = JOB | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    "SLURM_SRUN_COMM_PORT": "44901",
}
STEP_OF_ONE_NODE = STEP | {
    "SLURM_STEP_NODELIST": "n01",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_LOCALID": "3",
}
SHELL = STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
INTERACTIVE = STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1006764033",
    "PMIX_NAMESPACE": "1006764033",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "n01",
}
HYDRA = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_PORT": "n01:40123",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "4",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "40001",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PYTORCH_JOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "PYTHONUNBUFFERED": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
}
TRAIN_JOB = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
JOB_SET = {
    "JOBSET_NAME": "train",
    "JOB_COMPLETION_INDEX": "3",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "train-workers-0-0.train",
    "MASTER_PORT": "29500",
    "WEFT_RESTART_COUNT": "1",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-24-09-00-00-000000_cluster_2",
    "SKYPILOT_INTERNAL_JOB_ID": "2",
}
WEFT_RUN = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "WEFT_WORKER_NAME": "trainer2",
    "WEFT_RESTART_COUNT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
OPEN = {"RANK": "7", "WEFT_RESTART_COUNT": "1", "WEFT_INIT_METHOD": "unix://x"}

STEP_PORT = 17_000 + 4021 * 17 % 15_000
SKY_PORT = 17_000 + zlib.crc32(SKYPILOT["SKYPILOT_TASK_ID"].encode()) % 15_000
STEP_METHOD = f"tcp://n01:{STEP_PORT}"


@pytest.mark.parametrize(
    ("variables", "launcher", "rank", "size", "method"),
    [
        (STEP, "srun", 3, 4, STEP_METHOD),
        (STEP_OF_ONE_NODE, "srun", 3, 4, f"tcp://127.0.0.1:{STEP_PORT + 2}"),
        (
            STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "4021.0"},
            "srun",
            3,
            4,
            STEP_METHOD,
        ),
        (STEP | {"MASTER_PORT": "77"}, "srun", 3, 4, "tcp://n01:77"),
        (STEP | {"MASTER_ADDR": "fd00::7", "MASTER_PORT": "77"}, "srun", 3, 4, "env://"),
        (STEP | {"MASTER_ADDR": "fd00::7"}, "srun", 3, 4, f"tcp://[fd00::7]:{STEP_PORT}"),
        (STEP | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "srun", 3, 4, STEP_METHOD),
        (STEP | {"WEFT_WORKER_NAME": "ps"}, "srun", 3, 4, STEP_METHOD),
        (SHELL, "srun", 0, 1, f"tcp://127.0.0.1:{STEP_PORT}"),
        (SHELL | BY_HAND, "RANK and WORLD_SIZE", 1, 2, "env://"),
        (INTERACTIVE | BY_HAND, "RANK and WORLD_SIZE", 1, 2, "env://"),
        (STEP | TORCHRUN, "torchrun", 5, 8, "env://"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN, "torchrun", 5, 8, "env://"),
        (STEP | WEFT_RUN, "torchweft run", 2, 3, "env://"),
        (
            STEP | BY_HAND | {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"},
            "RANK and WORLD_SIZE",
            6,
            8,
            "env://",
        ),
        (OPEN_MPI, "mpirun of Open MPI", 1, 2, "tcp://127.0.0.1:21604"),
        (OPEN_MPI | STEP, "mpirun of Open MPI", 1, 2, "tcp://127.0.0.1:21604"),
        (HYDRA, "mpiexec (PMI)", 2, 4, "tcp://127.0.0.1:21279"),
        (HYDRA | STEP, "mpiexec (PMI)", 2, 4, "tcp://127.0.0.1:21279"),
        (TORCHRUN, "torchrun", 5, 8, "env://"),
        (PYTORCH_JOB, "PyTorchJob", 1, 3, "env://"),
        (PYTORCH_JOB | TORCHRUN, "torchrun", 5, 8, "env://"),
        (TRAIN_JOB, "Kubeflow", 2, 4, "tcp://job-node-0-0.job:29400"),
        (PYTORCH_JOB | {"PET_NNODES": "1:4"}, "PyTorchJob", 1, 3, "env://"),
        (
            {**TRAIN_JOB, "MASTER_ADDR": "h", "MASTER_PORT": "5"},
            "Kubeflow",
            2,
            4,
            "env://",
        ),
        (JOB_SET, "JobSet", 3, 8, "env://"),
        (JOB_SET | WEFT_RUN, "torchweft run", 2, 3, "env://"),
        (JOB_SET | TORCHRUN, "torchrun", 5, 8, "env://"),
        (SKYPILOT, "SkyPilot", 1, 3, f"tcp://10.0.0.4:{SKY_PORT}"),
        (SKYPILOT | {"MASTER_PORT": "8008"}, "SkyPilot", 1, 3, "tcp://10.0.0.4:8008"),
        (SKYPILOT | TORCHRUN, "torchrun", 5, 8, "env://"),
        (SKYPILOT | STEP, "srun", 3, 4, STEP_METHOD),
        (SKYPILOT | BY_HAND | {"WORLD_SIZE": "3"}, "SkyPilot", 1, 3, "env://"),
        (
            SKYPILOT | BY_HAND | {"RANK": "5", "WORLD_SIZE": "24", "LOCAL_RANK": "5"},
            "RANK and WORLD_SIZE",
            5,
            24,
            "env://",
        ),
        (WEFT_RUN, "torchweft run", 2, 3, "env://"),
        (OPEN, "torchweft run", 7, None, ""),
        (BY_HAND, "RANK and WORLD_SIZE", 1, 2, "env://"),
        (BATCH | BY_HAND, "RANK and WORLD_SIZE", 1, 2, "env://"),
        ({}, "", None, None, ""),
        ({"WORLD_SIZE": "3"}, "", None, 3, ""),
        (SALLOC, "", None, None, ""),
        (BATCH, "", None, None, ""),
    ],
)
def test_places(
    variables: Variables, launcher: str, rank: int | None, size: int | None, method: str
) -> None:
    found = find_placement(variables)
    assert (found.launcher, found.rank, found.world_size) == (launcher, rank, size)
    assert found.meeting.init_method == method


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (STEP | {"RANK": "0"}, "RANK is 0, but SLURM_PROCID of srun is 3; unset RANK"),
        (STEP | BY_HAND, "RANK is 1, but SLURM_PROCID of srun is 3"),
        (STEP | {"RANK": "3", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but SLURM_STEP_NUM_TASKS"),
        (STEP | {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2.*unset WORLD_SIZE, or start 2 tasks"),
        (OPEN_MPI | {"RANK": "0"}, "RANK is 0, but OMPI_COMM_WORLD_RANK of mpirun"),
        (HYDRA | {"WORLD_SIZE": "5"}, "WORLD_SIZE is 5, but PMI_SIZE"),
        (TRAIN_JOB | {"PET_NODE_RANK": "4"}, "PET_NODE_RANK is 4, but PET_NNODES is 4"),
        (TRAIN_JOB | BY_HAND, "RANK is 1, but PET_NODE_RANK of Kubeflow is 2"),
        (PYTORCH_JOB | {"RANK": "0"}, "RANK is 0, but PET_NODE_RANK of Kubeflow is 1; unset RANK"),
        (PYTORCH_JOB | {"WORLD_SIZE": "6"}, "WORLD_SIZE is 6, but PET_NNODES of Kubeflow is 3"),
        (TRAIN_JOB | {"WORLD_SIZE": "6"}, "WORLD_SIZE is 6, but PET_NNODES of Kubeflow is 4"),
        (SKYPILOT | {"RANK": "0"}, "RANK is 0, but SKYPILOT_NODE_RANK of SkyPilot is 1"),
        (SKYPILOT | {"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but SKYPILOT_NUM_NODES of SkyPilot"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "3"}, "SKYPILOT_NODE_RANK is 3, but SKYPILOT_NUM"),
        (BY_HAND | {"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1"),
        (BY_HAND | {"RANK": "-1"}, "RANK is '-1', which is no number"),
        (BY_HAND | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', which is no number"),
        (STEP | {"SLURM_PROCID": "9"}, "SLURM_PROCID is 9, but SLURM_STEP_NUM_TASKS is 4"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, "is no list of hosts"),
    ],
)
def test_contradictions_name_the_variables(variables: Variables, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_placement(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR to that host"),
        (HYDRA | {"MPI_LOCALNRANKS": "2"}, "set MASTER_ADDR to that host"),
        (STEP | {"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_STEP_NODELIST does not tell"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "set MASTER_PORT"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1"}, "set MASTER_ADDR and MASTER_PORT"),
        (TRAIN_JOB | {"PET_NNODES": "1:4"}, "PET_NNODES is 1:4, a number that may change"),
        (BATCH, "srun did not start this process of SLURM job 4021"),
        (SALLOC, "write 'srun python SCRIPT'"),
        ({"JOB_COMPLETION_INDEX": "3"}, r"set RANK=\$JOB_COMPLETION_INDEX.*torchweft manifest"),
        ({"PMIX_RANK": "3"}, r"set RANK=\$PMIX_RANK and WORLD_SIZE"),
        ({}, "'torchweft run', 'torchrun', 'srun' or 'mpirun'"),
    ],
)
def test_what_is_missing_is_told(variables: Variables, message: str) -> None:
    found = find_placement(variables)
    assert found.meeting.init_method == ""
    assert re.search(message, found.meeting.missing)
