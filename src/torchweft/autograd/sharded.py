"""Refuses passes that lead to parameters under fully sharded data parallelism (FSDP).

FSDP gathers a parameter for the forward pass. Its hooks reduce what a backward pass has accumulated
into ``.grad`` of the gathered parameter, and free it. A pass of Weft asks for gradients and
accumulates nothing. So FSDP would find nothing to reduce, and the gradients would be lost silently.

PyTorch tells nobody which parameters are gathered ones, so this module reads FSDP's own records.
Where another version of PyTorch has other records, nothing is found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchweft.autograd.walk import Reached
from torchweft.errors import AutogradError


def check_unsharded(reached_of: Mapping[int, Reached]) -> None:
    """Raises AutogradError if a send leads to a parameter under FSDP.

    Args:
        reached_of: The component of each send of this worker, by the number of the send.

    Raises:
        AutogradError: Names the module, and the way to train it beside Weft.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    gathered = {id(parameter): module for module, parameter in _gathered()}
    for reached in reached_of.values():
        for leaf in reached.leaves.values():
            if not isinstance(leaf, Tensor):
                continue
            module = gathered.get(id(leaf))
            if module is not None or getattr(leaf, "_is_flat_param", False):
                name = "a module" if module is None else f"the {type(module).__name__}"
                raise AutogradError(
                    f"this pass leads to {name} under FullyShardedDataParallel, whose gradients "
                    "only loss.backward() reduces. Let it begin at a leaf: "
                    "h = inputs.detach().requires_grad_(), call the module with h, run "
                    "loss.backward(), and go on with torchweft.autograd.backward(context_id, "
                    "[inputs], grad_tensors=[h.grad])"
                )


def _gathered() -> Iterator[tuple[nn.Module, Any]]:
    """Yields the gathered parameters of ``fully_shard``, with the modules that hold them."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    for module in list(getattr(states, "_module_state_mapping", ())):
        state = states._get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # Earlier versions have one at most.
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                yield module, getattr(parameter, "_unsharded_param", None)
