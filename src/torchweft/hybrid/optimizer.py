"""One optimizer for the rows on servers, the tables that stay copies, and the dense part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.autograd import get_gradients
from torchweft.embedding import SGD, Adagrad, Rule, TablesOptimizer
from torchweft.embedding.requests import StackRequest
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.hybrid.placement import FoundTable, ids_of
from torchweft.hybrid.plan import PlacementError
from torchweft.optim import states
from torchweft.optim.clipping import check_norms, coefficient_of, norm, norm_of, on_host

# The tables that stay with the trainers


class Copied:
    """A table that each trainer has, with dense gradients; knows which rows were used.

    Args:
        found: The table; its gradients become dense.
    """

    def __init__(self, found: FoundTable) -> None:
        self.name = found.name
        self.parameter = cast("nn.Parameter", found.table.weight)
        self.used = torch.zeros(len(self.parameter), dtype=torch.bool, device="cpu")
        """The rows that have had a gradient of this trainer since the last step."""
        found.table.sparse = False
        found.table.register_forward_hook(self._watch, with_kwargs=True)

    def _watch(self, table: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if output.requires_grad:
            ids = ids_of(table, args, kwargs)
            output.register_hook(lambda _: self._note(ids))  # type: ignore[no-untyped-call]

    def _note(self, ids: Tensor) -> None:
        self.used[ids.cpu()] = True


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
        # A state says of which rule it is.
        super().__init__(
            [each.parameter for each in copies], {"lr": rule.lr, "rule": rule.settings()}
        )
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

    def difference(self, state_dict: Mapping[str, Any]) -> str:
        """Returns why a state is none of these copies; empty if it is."""
        rule, own = state_dict["param_groups"][0].get("rule"), self._rule.settings()
        if rule != own:
            return f"the state of copies is that of {rule}, and the tables have {own}"
        problems = states.differences(self, (), state_dict)
        for number, each in enumerate(self._copies):
            present, saved = self.state[each.parameter], state_dict["state"].get(number, {})
            if saved.keys() != present.keys():
                problems.append(f"copy {number} has {sorted(saved)}, not {sorted(present)}")
            shape = each.parameter.shape
            problems += states.misfits(f"copy {number}", shape, saved, type(self), present)
        return "; ".join(problems)


def keeps_rows_without_gradient(rule: Rule) -> bool:
    """Whether a rule leaves a row, and the state beside it, as they are if its gradient is zero."""
    if isinstance(rule, Adagrad):
        return rule.eps > 0
    return isinstance(rule, SGD) and not rule.momentum


# All parts

DenseFactory = Callable[[list[nn.Parameter]], Optimizer]
_NAMED = 4
"""How many differences a message names."""
MeasureRows = Callable[[Sequence[tuple[StackRequest, Tensor]], float], list[Tensor]]


class HybridOptimizer(Optimizer):
    """Steps all parameters of a ``HybridModel``; made by ``HybridModel.optimizer``.

    ``param_groups`` has a group for the rows on servers, one for the tables that stay copies (each
    if there are such), and those of the dense part's optimizer. Learning rates may be changed
    there at any time, also by the schedulers of ``torch.optim.lr_scheduler``. Gradients of several
    backward passes add up. ``step`` drops those of rows, and ``zero_grad`` all of them; a step that
    would use those of dense parameters a second time, without those of rows, warns. Not
    thread-safe.

    Args:
        rows: Steps the rows on servers, if there are some.
        copies: Steps the tables that stay copies, if there are some.
        dense: Steps the other parameters, if there are some.
        measure: Returns the norms of the averaged gradients of rows, one for each server.
    """

    def __init__(
        self,
        rows: TablesOptimizer | None,
        copies: CopiesOptimizer | None,
        dense: Optimizer | None,
        measure: MeasureRows,
    ) -> None:
        self.rows = rows
        self.copies = copies
        self.dense = dense
        self._measure = measure
        self._are_dropped, self._has_warned = True, False
        self._is_base_ready = False
        super().__init__([{"params": []}], {})
        self._is_base_ready = True
        self.state = states.elsewhere("in the parts of this optimizer: rows, copies and dense")
        self._collect_groups()

    def _collect_groups(self) -> None:
        # The dicts of the parts themselves: a change of a learning rate reaches them.
        self.param_groups[:] = [
            group for part in self._parts().values() for group in part.param_groups
        ]

    def _parts(self) -> dict[str, Optimizer]:
        parts = {"rows": self.rows, "copies": self.copies, "dense": self.dense}
        return {name: part for name, part in parts.items() if part is not None}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the parameters are those of the model.

        Raises:
            ConfigurationError: Always.
        """
        if self._is_base_ready:
            raise ConfigurationError(
                "the parameters of this optimizer are those of its model; make the groups of the "
                "dense part in HybridModel.optimizer(dense=...)"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients.

        Args:
            set_to_none: Whether those of dense parameters become None, or zeros. Rows without a
                gradient are never stepped.
        """
        self._are_dropped = True
        for part in self._parts().values():
            part.zero_grad(set_to_none)

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Makes one step of all parts, and waits until all trainers have made it. Blocks.

        Every trainer calls it once for each step. The rows are first: if that fails, the dense
        part has not changed.

        Args:
            context_id: A context of distributed autograd, whose gradients are used; by default
                those in ``.grad``.

        Raises:
            WorkerLost: A server or a trainer is lost.
            CallTimeout: Other trainers have not made this step in time; names them.
            AutogradError: There is no such context here.
        """
        if context_id is not None:
            states.check_context_id(context_id)
        if self.rows is not None:
            if context_id is None:
                self._check_dropped(bool(self.rows.param_groups[0]["params"]))
            self.rows.step(context_id)
        with self._gradients_of(context_id):
            for part in (self.copies, self.dense):
                if part is not None:
                    part.step()

    def _check_dropped(self, has_rows: bool) -> None:
        """Warns of a program that expects the gradients of an earlier step in this one."""
        are_dropped, self._are_dropped = self._are_dropped, not has_rows
        if not are_dropped and not self._has_warned and self.dense is not None:
            self._has_warned = True
            warnings.warn(
                "step() without zero_grad() since the step before: the gradients of dense "
                "parameters are used again, and those of rows are not; call zero_grad() before "
                "each backward pass",
                RuntimeWarning,
                stacklevel=4,  # Outside of step, and of the wrapper that torch puts around it.
            )

    @contextmanager
    def _gradients_of(self, context_id: int | None) -> Iterator[None]:
        """Has the gradients of a context in ``.grad``."""
        if context_id is None:
            yield
            return
        found = get_gradients(context_id)
        before = [(each, each.grad) for each in self._local()]
        try:
            for parameter, _ in before:
                parameter.grad = found.get(parameter)
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient

    def _local(self) -> list[Tensor]:
        """Returns the parameters that each trainer has."""
        parts = [part for part in (self.copies, self.dense) if part is not None]
        return [each for part in parts for group in part.param_groups for each in group["params"]]

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        context_id: int | None = None,
    ) -> Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``. Blocks.

        The norm is that of the joined batch's gradient: the average over trainers, of the dense
        part and of rows. So it is the number that ``torch.nn.utils.clip_grad_norm_`` returns in one
        process. All trainers call it once, between the backward pass and the step.

        With several trainers, each sends the gradients of its rows to the servers once more, as
        much as a push: rows that two trainers have used must be summed before they are squared.

        Args:
            max_norm: The largest total norm.
            norm_type: The p of the p-norm; ``math.inf`` for the largest absolute value.
            error_if_nonfinite: Whether to raise if the total is infinite or NaN.
            context_id: A context of distributed autograd; by default gradients are in ``.grad``.

        Returns:
            The total norm before scaling, a scalar on the CPU; the same for all trainers.

        Raises:
            ConfigurationError: ``max_norm`` is negative, or ``norm_type`` is not positive.
            OptimizerError: The total is not finite, and that is an error. Nothing was scaled.
            WorkerLost: A server or a trainer is lost.
            CallTimeout: Another trainer did not call it in time.
        """
        max_norm, norm_type = check_norms(max_norm, norm_type)
        dense, leaves = self._found(context_id)
        norms = on_host([norm(gradient, norm_type) for gradient in dense])
        norms += self._measure(leaves, norm_type)
        total = norm_of(norms, norm_type)
        factor = coefficient_of(total, max_norm, error_if_nonfinite=error_if_nonfinite)
        if factor is not None:
            for gradient in [*dense, *(gradient for _, gradient in leaves)]:
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
        return total

    def _found(
        self, context_id: int | None
    ) -> tuple[list[Tensor], list[tuple[StackRequest, Tensor]]]:
        """Returns the gradients of the local parameters, and those of lookups."""
        touched = [] if self.rows is None else list(self.rows.param_groups[0]["params"])
        if context_id is None:
            of: Callable[[Tensor], Tensor | None] = lambda each: each.grad  # noqa: E731
        else:
            of = get_gradients(context_id).get
        dense = [gradient for each in self._local() if (gradient := of(each)) is not None]
        leaves = [
            (cast("StackRequest", leaf.weft_pulled), gradient)
            for leaf in touched
            if (gradient := of(leaf)) is not None
        ]
        return dense, leaves

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the trainer's parts, and the group of the rows.

        The state of rows on servers is beside them: ``HybridModel.save`` has all of it. Beside the
        parts there is ``classes``, the names of the dense optimizer's class and its bases.
        """
        return states.saved_with_hooks(self, self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        return {
            **dict.fromkeys(("rows", "copies", "dense")),
            **{name: part.state_dict() for name, part in self._parts().items()},
            "classes": [] if self.dense is None else states.lineage(type(self.dense)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` has returned; the state keeps its types.

        Raises:
            ConfigurationError: It is of a model with other parts, of another rule or class, or of
                parameters of other shapes; nothing was changed.
        """
        states.loaded_with_hooks(self, state_dict, self._load_state_dict)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        problems = self.weft_differences("the state", state_dict)
        if problems:
            raise ConfigurationError(
                f"{'; '.join(problems[:_NAMED])}. Nothing was loaded; load what state_dict() of an "
                "optimizer of the same rule, class and model returned"
            )
        for name, part in self._parts().items():
            states.load_exactly(part, state_dict[name])
        self._collect_groups()

    def weft_differences(self, path: str, state: Any) -> list[str]:
        """Returns why this optimizer cannot have a saved state; for ``torchweft.checkpoint``."""
        if not isinstance(state, dict):
            return [f"{path} is {kind_of(state)}, and no state_dict of a HybridOptimizer"]
        for name in ("rows", "copies", "dense"):
            is_here = name in self._parts()
            if (state.get(name) is not None) != is_here:
                only, other = ("has", "lacks") if is_here else ("lacks", "has")
                return [
                    f"this optimizer {only} the part {name!r}, and {path} {other} it: place the "
                    "tables as they were, by places={...}"
                ]
        found = [] if self.rows is None else [self.rows.difference(state["rows"])]
        found += [] if self.copies is None else [self.copies.difference(state["copies"])]
        if self.dense is not None:
            classes = states.lineage(type(self.dense))
            found += states.differences(self.dense, classes, state["dense"], state["classes"])
        return [f"{path}: {each}" for each in found if each]


def make_dense(factory: Any, parameters: dict[str, nn.Parameter]) -> Optimizer | None:
    """Returns the optimizer of the dense part; None if it has no parameter.

    Args:
        factory: Returns an optimizer of the parameters that it is given.
        parameters: The parameters, by name.

    Raises:
        ArgumentTypeError: The factory is none, or returns something else.
        PlacementError: It returns an optimizer of other parameters.
        ConfigurationError: It returns one that needs a closure.
    """
    example = "dense=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
    if not callable(factory):
        raise ArgumentTypeError(
            f"dense is {kind_of(factory)}; pass a function of the dense parameters that returns "
            f"their optimizer, such as {example}"
        )
    if not parameters:
        return None
    optimizer = factory(list(parameters.values()))
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"dense returned {kind_of(optimizer)}; it returns an optimizer, such as {example}"
        )
    if states.needs_closure(type(optimizer)):
        raise ConfigurationError(
            f"dense returned a {type(optimizer).__name__}, which evaluates the model anew within a "
            "step, by a closure; use an optimizer that steps with given gradients"
        )
    own = {id(each) for each in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for each in group["params"]:
            if id(each) not in own:
                raise PlacementError(
                    f"group {number} of the dense optimizer has a parameter of shape "
                    f"{tuple(each.shape)} that is not in the dense part; use the parameters that "
                    "dense= is called with"
                )
    return optimizer
