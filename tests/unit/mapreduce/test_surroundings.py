from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torchweft.agent.served_calls import current_call
from torchweft.autograd.contexts import current_id, enter
from torchweft.mapreduce.surroundings import Surroundings, surroundings

CALL: Any = object()
NOTHING = Surroundings(0, True, None)


def test_they_are_those_of_the_thread() -> None:
    assert surroundings() == NOTHING
    token = current_call.set(CALL)
    with enter(5), torch.no_grad():
        assert surroundings() == Surroundings(5, False, CALL)
    current_call.reset(token)
    assert surroundings() == NOTHING


@pytest.mark.parametrize("context_id", [0, 5])
@pytest.mark.parametrize("is_grad_enabled", [False, True])
def test_another_thread_may_be_in_them(context_id: int, is_grad_enabled: bool) -> None:
    wanted = Surroundings(context_id, is_grad_enabled, CALL)

    def enter_and_leave() -> list[Surroundings]:
        with wanted.entered():
            within = surroundings()
            with NOTHING.entered():
                nested = surroundings()
            again = surroundings()
        return [within, nested, again, surroundings()]

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(enter_and_leave).result(20.0)
    assert seen == [wanted, NOTHING, wanted, NOTHING]
    assert surroundings() == NOTHING


def test_who_raises_leaves_them() -> None:
    with pytest.raises(KeyError), Surroundings(5, False, CALL).entered():
        raise KeyError
    assert surroundings() == NOTHING


@pytest.mark.parametrize(
    ("context_id", "is_grad_enabled", "is_recorded"),
    [(0, True, False), (5, False, False), (5, True, True)],
)
def test_what_is_recorded(context_id: int, is_grad_enabled: bool, is_recorded: bool) -> None:
    made = Surroundings(context_id, is_grad_enabled, None)
    assert made.is_recorded is is_recorded
    with made.entered():
        assert current_id() == context_id
