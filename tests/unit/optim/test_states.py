"""Tests the format of a ``state_dict``, and the errors for one that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from torchweft.errors import ConfigurationError
from torchweft.optim.states import Parameter, as_state_dict, check_fits

SHAPES = [(2,), (3, 4), ()]
PARAMETERS = [
    Parameter(owner, shape, "float32") for owner, shape in zip("aba", SHAPES, strict=True)
]
STATE = as_state_dict(
    [{"lr": 0.1}, {"lr": 0.2}],
    [1, 2],
    {0: {"step": 1}, 2: {"step": 3}},
    PARAMETERS,
    ["SGD"],
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param_groups": []}, "has 0 parameter groups, the optimizer 2"),
        (
            {"param_groups": [{"params": [0]}, {"params": [1]}]},
            "has 1 parameters in group 1, the optimizer 2",
        ),
        (
            {"parameters": [{"shape": (2,)}, {"shape": [4, 3]}]},
            r"has shape \(4, 3\) for parameter 1, the optimizer \(3, 4\)",
        ),
        (
            {"parameters": [{"shape": (2,), "dtype": "float64"}]},
            "has type float64 for parameter 0, the optimizer float32",
        ),
        ({"param_groups": [{}]}, 'a parameter group has no "params"'),
    ],
)
def test_what_differs_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_fits({**STATE, **change}, [1, 2], PARAMETERS)


@pytest.mark.parametrize("wrong", [None, [], {"state": {}}])
def test_what_is_no_state_dict_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="no state_dict of an optimizer"):
        check_fits(wrong, [1, 2], PARAMETERS)
