from __future__ import annotations

import pytest
import torch

from tests.conformance.shims.fault_plan import NAMES, Plan, is_scripted
from torchweft.errors import ConfigurationError


def test_a_message_fails_its_first_sends() -> None:
    plan = Plan(["PYTHON_CALL"], {}, 2)
    assert [plan.takes("PYTHON_CALL", 1, b"x") for _ in range(4)] == [True, True, False, False]
    assert plan.takes("PYTHON_CALL", 1, b"another")
    assert not plan.takes("SCRIPT_CALL", 1, b"x")
    assert not Plan(["PYTHON_CALL"], {}, 0).takes("PYTHON_CALL")


def test_what_it_concerns() -> None:
    plan = Plan(["PYTHON_CALL"], {"SCRIPT_CALL": 1.5, "RREF_USER_DELETE": 0}, 1)
    assert [name for name in NAMES if plan.concerns(name)] == ["PYTHON_CALL", "SCRIPT_CALL"]
    assert plan.delay_s("SCRIPT_CALL") == 1.5
    assert plan.delay_s("PYTHON_CALL") == 0


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'NO_SUCH' cannot have faults; there are PYTHON"):
        Plan(["PYTHON_CALL", "NO_SUCH"], {}, 1)
    with pytest.raises(ConfigurationError, match="'NO_SUCH'"):
        Plan([], {"NO_SUCH": 1.0}, 1)
    with pytest.raises(ConfigurationError, match="0 or more"):
        Plan([], {"PYTHON_CALL": -1.0}, 1)
    with pytest.raises(ConfigurationError, match="0 or more"):
        Plan([], {}, -1)


def test_what_pytorch_sends_as_a_script() -> None:
    scripted = torch.jit.CompilationUnit("def same(x):\n    return x\n").same
    assert all(map(is_scripted, (torch.add, torch.ones, scripted)))
    assert not any(map(is_scripted, (len, torch.nn.functional.relu, Plan, lambda: 0)))
