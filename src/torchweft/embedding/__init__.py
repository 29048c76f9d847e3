"""Embedding tables on servers: large tables cut into shards, rows pulled and gradients pushed."""

from torchweft.embedding import aggregator, host, occupied, saved
from torchweft.embedding.cache import Cache
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
from torchweft.embedding.optimizer import TablesOptimizer
from torchweft.embedding.plan import (
    ColumnWise,
    Constant,
    Copies,
    Dynamic,
    Normal,
    Placed,
    Plan,
    RowWise,
    Shard,
    Shards,
    StepCost,
    TableConfig,
    TableWise,
    Touched,
    Uniform,
    fit_step_cost,
    plan_tables,
)
from torchweft.embedding.pulled import Traffic
from torchweft.embedding.recovery import recover
from torchweft.embedding.rules import SGD, Adagrad, RowWiseAdagrad, Rule, SparseAdam
from torchweft.embedding.stream import RowStream
from torchweft.embedding.tables import Tables
from torchweft.embedding.touched import touched_shares
from torchweft.embedding.tuning import Tuning, tune_partitions
from torchweft.embedding.wire import Wire

CALLABLES = (
    *(*aggregator.CALLABLES, *host.CALLABLES, *occupied.CALLABLES, *saved.CALLABLES),
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
