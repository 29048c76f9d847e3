"""The optimizer of the tables that stay with the trainers: by the rule of the rows on servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchweft.embedding import SGD, Adagrad, Rule
from torchweft.errors import ConfigurationError
from torchweft.hybrid.lookups import Copied
from torchweft.optim import states


class CopiesOptimizer(Optimizer):
    """Steps copies of tables as their rows would be stepped on a server.

    So the placement of a table does not change the result. The gradients are dense, and averaged
    already. A rule that also moves rows whose gradient is zero needs to know which rows the
    trainers have used: then they join a byte for each row. Not thread-safe.

    Args:
        copies: The tables.
        rule: The optimizer of rows.
        join: Replaces a tensor by its maximum over all trainers, element by element.
    """

    def __init__(
        self, copies: Sequence[Copied], rule: Rule, join: Callable[[Tensor], None]
    ) -> None:
        super().__init__([each.parameter for each in copies], {"lr": rule.lr})
        self._copies = copies
        self._rule = rule
        self._join = join
        for each in copies:
            state = rule.state_for(each.parameter.detach())
            self.state[each.parameter] = {
                **state,
                "step": torch.zeros((), dtype=torch.float64),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes one step, and drops the gradients, as for rows on servers; each trainer does."""
        chosen: Sequence[Tensor | None] = [None] * len(self._copies)
        if not keeps_rows_without_gradient(self._rule):
            chosen = self._used_by_any()
        for each, rows in zip(self._copies, chosen, strict=True):
            self._step(each, rows)
            each.used.zero_()
            each.parameter.grad = None

    def _used_by_any(self) -> list[Tensor]:
        joined = torch.cat([each.used for each in self._copies]).to(torch.uint8)
        joined = joined.to(self._copies[0].parameter.device)
        self._join(joined)
        parts = torch.split(joined, [len(each.used) for each in self._copies])
        return [part.nonzero().view(-1) for part in parts]

    def _step(self, copied: Copied, rows: Tensor | None) -> None:
        gradient = copied.parameter.grad
        if gradient is None:
            return
        held = self.state[copied.parameter]
        held["step"] += 1
        names = [name for name in held if name != "step"]
        weights = copied.parameter.detach()
        lr = float(self.param_groups[0]["lr"])
        if rows is None:
            state = {name: held[name] for name in names}
            self._rule.apply(weights, state, gradient, lr, held["step"])
            return
        some = weights[rows]
        state = {name: held[name][rows] for name in names}
        self._rule.apply(some, state, gradient[rows], lr, held["step"])
        weights[rows] = some
        for name in names:
            held[name][rows] = state[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients.

        Args:
            set_to_none: Makes no difference: rows without a gradient are never stepped.
        """
        super().zero_grad(set_to_none=True)
        for each in self._copies:
            each.used.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the copies, and the settings of the rule."""
        return {**super().state_dict(), "rule": self._rule.settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` has returned.

        Raises:
            ConfigurationError: It is of another rule, or of other tables.
        """
        problem = self.difference(state_dict)
        if problem:
            raise ConfigurationError(problem)
        super().load_state_dict({key: each for key, each in state_dict.items() if key != "rule"})

    def difference(self, state_dict: Any) -> str:
        """Returns why a state is none of these copies; empty if it is."""
        if not isinstance(state_dict, dict) or "param_groups" not in state_dict:
            return "this is no state_dict of copies of tables"
        rule, own = state_dict.get("rule"), self._rule.settings()
        if rule != own:
            return f"the state of copies is that of {rule}, and the tables have {own}"
        for number, each in enumerate(self._copies):
            present = self.state[each.parameter]
            saved = state_dict["state"].get(number, {})
            problems = states.misfits(
                f"copy {number}", each.parameter.shape, saved, type(self), present
            )
            if saved.keys() != present.keys():
                return f"the state of copy {number} has {sorted(saved)}, not {sorted(present)}"
            for problem in problems:
                return problem
        return ""


def keeps_rows_without_gradient(rule: Rule) -> bool:
    """Whether a rule leaves a row, and the state beside it, as they are if its gradient is zero."""
    if isinstance(rule, Adagrad):
        return rule.eps > 0
    return isinstance(rule, SGD) and not rule.momentum
