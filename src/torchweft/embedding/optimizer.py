"""Steps the rows of tables on their servers, with the interface of ``torch.optim``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchweft.arguments import is_number
from torchweft.autograd import get_gradients
from torchweft.embedding.client import Pushes
from torchweft.embedding.errors import InputError
from torchweft.embedding.requests import StackRequest
from torchweft.embedding.rows import Form, Part, encode, sum_rows
from torchweft.embedding.rules import Rule
from torchweft.errors import ConfigurationError
from torchweft.optim import states


class TablesOptimizer(Optimizer):
    """Steps the tables of a collection; made by ``Tables.optimizer``.

    ``param_groups[0]`` holds the learning rate, which may be changed at any time, also by the
    schedulers of ``torch.optim.lr_scheduler``; and the pulled rows that have a gradient, until the
    step. Gradients of several backward passes add up until ``step`` or ``zero_grad``. Not
    thread-safe.

    Args:
        rule: The optimizer of the rows.
        touched: The leaves that have a gradient; the collection adds to it.
        push: Sends the gradients of a step.
        form: The form of the gradients in messages.
    """

    def __init__(
        self,
        rule: Rule,
        touched: list[Tensor],
        push: Callable[[float, Sequence[StackRequest], Pushes], None],
        form: Form | None = None,
    ) -> None:
        self._form = form
        self._touched = touched
        self._push = push
        self._is_base_ready = False
        super().__init__([{"params": []}], {"lr": rule.lr})
        self._is_base_ready = True
        self.rule = rule
        self.state = states.elsewhere("beside the rows on servers; Tables.save saves it")
        self.param_groups.append({"params": touched, "lr": rule.lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: rows are found by lookups.

        Raises:
            ConfigurationError: Always.
        """
        if self._is_base_ready:
            raise ConfigurationError("the parameters of this optimizer are the rows of its tables")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that were not pushed.

        Args:
            set_to_none: Makes no difference: rows without a gradient are never stepped.
        """
        for leaf in self._touched:
            leaf.grad = None
            leaf.weft_pulled.is_noted = False  # type: ignore[attr-defined]
        self._touched.clear()

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Pushes the gradients and drops them; waits until this trainer may go on. Blocks.

        With ``staleness=0``, that is when all trainers have made this step. Every trainer calls it
        once for each step, also if it has looked nothing up.

        Args:
            context_id: A context of distributed autograd, whose gradients are pushed; by default
                those in ``.grad``.

        Raises:
            WorkerLost: A server, or a trainer that this step waits for, is lost.
            CallTimeout: Other trainers have not made this step in time; names them.
            CapacityError: It has more dynamic ids than a server has rows for. Nothing was sent, and
                the gradients are dropped; the step may be made with fewer.
            StepError: An earlier step of this trainer has failed; nothing was sent.
            ConfigurationError: The learning rate is not a number of at least 0; nothing was sent.
            InputError: A gradient is not of the shape and type of the rows; nothing was sent.
            AutogradError: There is no such context here.
        """
        if context_id is not None:
            states.check_context_id(context_id)
        lr = self.param_groups[0]["lr"]
        if (not is_number(lr) and not isinstance(lr, Tensor)) or not 0 <= lr < math.inf:
            raise ConfigurationError(f"the learning rate is {lr!r}; it is a number of at least 0")
        # In the order of lookups, whatever the order of the backward pass: sums repeat bit by bit.
        found = sorted(self._found(context_id), key=lambda each: each[0].place)
        pushes: Pushes = {}
        for pulled, gradient in found:
            _check_gradient(pulled, gradient)
            own = pulled.pushes(gradient)
            for server in pulled.stack.servers:
                by_stack = pushes.setdefault(server, {})
                used, parts = by_stack.get(pulled.number, (0, []))
                parts = [*parts, own[server]] if server in own else parts
                by_stack[pulled.number] = used | pulled.used, parts
        for by_stack in pushes.values():
            for number, (used, parts) in by_stack.items():
                encoded = [(*part, encode(values, self._form)) for *part, values in _merged(parts)]
                by_stack[number] = used, encoded
        self._push(float(lr), [pulled for pulled, _ in found], pushes)

    def _found(self, context_id: int | None) -> Iterable[tuple[StackRequest, Tensor]]:
        """Takes the leaves with their gradients."""
        if context_id is None:
            found = [
                (_request_of(leaf), leaf.grad.detach())
                for leaf in self._touched
                if leaf.grad is not None
            ]
            self.zero_grad()
            return found
        mine = {id(leaf): leaf for leaf in self._touched}
        found = []
        for leaf, gradient in get_gradients(context_id).items():
            if mine.pop(id(leaf), None) is not None:
                found.append((_request_of(leaf), gradient))
        self._touched[:] = mine.values()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings of the rule, and the learning rate with all else in the group.

        The state of the rows is beside them: ``Tables.save`` has it.
        """
        return states.saved_with_hooks(self, self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        (group,) = self.param_groups
        options = {key: value for key, value in group.items() if key != "params"}
        return {
            "state": {},
            "param_groups": [{**states.copied_options(options), "params": []}],
            "rule": self.rule.settings(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` has returned.

        Raises:
            ConfigurationError: It is that of another optimizer or rule.
        """
        states.loaded_with_hooks(self, state_dict, self._load_state_dict)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        problem = self.difference(state_dict)
        if problem:
            raise ConfigurationError(f"{problem}; load what state_dict() of the same rule returned")
        (saved,) = state_dict["param_groups"]
        (group,) = self.param_groups
        group.clear()
        group.update(states.copied_options(saved), params=self._touched)

    def difference(self, state_dict: Any) -> str:
        """Returns why a state is none of this optimizer; empty if it is."""
        if not isinstance(state_dict, dict) or len(state_dict.get("param_groups", ())) != 1:
            return "this is no state_dict of the optimizer of tables"
        rule, own = state_dict.get("rule"), self.rule.settings()
        return "" if rule == own else f"the state is that of {rule}, and the tables have {own}"


def _request_of(leaf: Tensor) -> StackRequest:
    request: StackRequest = leaf.weft_pulled  # type: ignore[attr-defined]
    return request


def _check_gradient(request: StackRequest, gradient: Tensor) -> None:
    stack = request.stack
    if gradient.layout is not torch.strided or gradient.dtype != stack.dtype:
        names = ", ".join(dict.fromkeys(each.member.config.name for each in request.tables))
        servers = ", ".join(stack.servers)
        raise InputError(
            f"a gradient of rows of {names} on {servers} is {gradient.layout} of {gradient.dtype}; "
            f"it must be dense, of {stack.dtype}",
            table=names,
            server=servers,
        )


def _merged(parts: list[Part]) -> list[Part]:
    """Sums gradients of rows, so that each row is pushed once."""
    rows = [part for part in parts if len(part) == 2]
    if len(rows) < 2:
        return parts
    return [sum_rows(rows), *(part for part in parts if len(part) > 2)]
