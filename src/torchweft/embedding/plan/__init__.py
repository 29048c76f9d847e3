"""Where tables go: configs, shards, the decision, and the layout that follows; pure."""

from torchweft.embedding.plan.configs import (
    Constant,
    Dynamic,
    Evict,
    Initial,
    Normal,
    TableConfig,
    Uniform,
    check_names,
)
from torchweft.embedding.plan.layout import Layout, Member, Stack, lay_out
from torchweft.embedding.plan.partitions import StepCost, fit_step_cost
from torchweft.embedding.plan.planner import Placed, Plan, Touched, plan_tables, shown_bytes
from torchweft.embedding.plan.shards import (
    ColumnWise,
    Copies,
    Place,
    RowWise,
    Shard,
    Shards,
    TableWise,
    check_cover,
)

__all__ = [
    "ColumnWise",
    "Constant",
    "Copies",
    "Dynamic",
    "Evict",
    "Initial",
    "Layout",
    "Member",
    "Normal",
    "Place",
    "Placed",
    "Plan",
    "RowWise",
    "Shard",
    "Shards",
    "Stack",
    "StepCost",
    "TableConfig",
    "TableWise",
    "Touched",
    "Uniform",
    "check_cover",
    "check_names",
    "fit_step_cost",
    "lay_out",
    "plan_tables",
    "shown_bytes",
]
