"""Names of parameters that stay the same wherever the parameters live.

The optimizer's state of a parameter must find it again when the model is spread over the workers
in another way, and its number among the parameters is another. So each is called what it is called
in the state that is saved: ``path of the module:name in it``. One that is in no entry of its
owner's part goes by its number, ``#3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def parameter_names(items: Mapping[str, Any], parameters: Mapping[int, Tensor]) -> dict[int, str]:
    """Returns the names of parameters by their numbers.

    Args:
        items: The entries of the state that live where the parameters do, by path.
        parameters: The parameters by their numbers.
    """
    names: dict[Tensor, str] = {}
    for path, value in items.items():
        if isinstance(value, Tensor):
            names.setdefault(value, path)
            continue
        named_parameters = getattr(value, "named_parameters", None)
        if callable(named_parameters) and not hasattr(value, "module_rref"):
            for name, parameter in named_parameters():
                names.setdefault(parameter, f"{path}:{name}")
    return {number: names.get(parameter, f"#{number}") for number, parameter in parameters.items()}
