"""Maps over more workers than one worker sends to, and over restricted workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import mapreduce_functions_m as parts
from tests.contract.processes.functions import options
from tests.contract.processes.mapreduce_gradients import (
    on,
)
from torchweft import mapreduce
from torchweft.errors import NotAllowed, SerializationError
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ("worker0", "worker1")


# Restricted workers


@pytest.mark.parametrize(
    "how", [{"allowed_modules": ("torch",)}, {"strict": True}], ids=["allow-list", "strict"]
)
def test_an_object_is_no_way_around_a_restriction(nursery: Nursery, how: dict[str, Any]) -> None:
    restricted = options(**how)
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=restricted):
        for workers in (WORKERS, ("worker0",)):
            for function in (parts.double, os.path.exists, lambda value: value):
                with pytest.raises((NotAllowed, SerializationError)):
                    mapreduce.remote_sync_call(
                        function, args=(torch.ones(6, 2),), partitioner=on(*workers)
                    )
