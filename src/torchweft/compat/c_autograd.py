"""The names that programs take from ``torch._C._distributed_autograd``, meaning Weft."""

# ruff: noqa: F401

from torchweft.compat.autograd import (
    DistAutogradContext,
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    get_gradients,
)
