"""Embedding tables on servers: large tables cut into shards, rows pulled and gradients pushed."""

from torchweft.embedding.cache import Cache
from torchweft.embedding.client import join
from torchweft.embedding.configs import (
    ColumnWise,
    Constant,
    Copies,
    Dynamic,
    Normal,
    RowWise,
    Shard,
    Shards,
    TableConfig,
    TableWise,
    Uniform,
)
from torchweft.embedding.dynamic import Occupancy
from torchweft.embedding.errors import (
    BadIds,
    BadOffsets,
    CapacityError,
    IdOutOfRange,
    InputError,
    PlanError,
    StepError,
    TablesMismatch,
)
from torchweft.embedding.inputs import Jagged
from torchweft.embedding.lookup import RowStream
from torchweft.embedding.optimizer import TablesOptimizer
from torchweft.embedding.planner import Placed, Plan, Touched, plan_tables, touched_shares
from torchweft.embedding.recovery import recover
from torchweft.embedding.requests import Traffic
from torchweft.embedding.rows import Wire
from torchweft.embedding.rules import SGD, Adagrad, RowWiseAdagrad, Rule, SparseAdam
from torchweft.embedding.server import set_up
from torchweft.embedding.tables import Tables
from torchweft.embedding.tuning import StepCost, Tuning, fit_step_cost, tune_partitions

CALLABLES = (
    *(join, set_up),
    *(BadIds, BadOffsets, CapacityError, IdOutOfRange, InputError, PlanError, StepError),
    TablesMismatch,
)
"""The callables that a strict worker names in ``RpcBackendOptions(callables=...)`` to be a server
of tables, or to be told the errors of servers."""

__all__ = [
    "CALLABLES",
    "Adagrad",
    "BadIds",
    "BadOffsets",
    "Cache",
    "CapacityError",
    "ColumnWise",
    "Constant",
    "Copies",
    "Dynamic",
    "IdOutOfRange",
    "InputError",
    "Jagged",
    "Normal",
    "Occupancy",
    "Placed",
    "Plan",
    "PlanError",
    "RowStream",
    "RowWise",
    "RowWiseAdagrad",
    "Rule",
    "SGD",
    "Shard",
    "Shards",
    "SparseAdam",
    "StepCost",
    "StepError",
    "TableConfig",
    "TableWise",
    "Touched",
    "Tables",
    "TablesMismatch",
    "TablesOptimizer",
    "Traffic",
    "Tuning",
    "Uniform",
    "Wire",
    "fit_step_cost",
    "plan_tables",
    "recover",
    "touched_shares",
    "tune_partitions",
]
