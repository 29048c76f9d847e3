"""Clips by the norm of all gradients of a context, on all workers.

This takes up to two rounds over the owners. First, each owner returns the norms of its gradients,
one number a parameter. Then, only if the total is too large, each scales its gradients in place.
Gradients do not travel. The norms are combined in the order of the parameters, so the total equals
that of ``torch.nn.utils.clip_grad_norm_`` in one process, to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.autograd import get_gradients
from torchweft.autograd.contexts import enter
from torchweft.autograd.engine import current_engine
from torchweft.engine.codec.registry import remotely_callable
from torchweft.errors import (
    ArgumentTypeError,
    AutogradError,
    ConfigurationError,
    OptimizerError,
)
from torchweft.optim.distributed import raise_failures, run_on_owners
from torchweft.optim.local import Address, address_of, value_at
from torchweft.optim.states import by_owner, read_references
from torchweft.rpc import RRef
from torchweft.rpc.serving import check_types

__all__ = [
    "check_norms",
    "clip_grad_norm_",
    "coefficient_of",
    "measure_remotely",
    "norm",
    "norm_of",
    "on_host",
    "scale_remotely",
]

_DIVISION_GUARD = 1e-6
"""The constant that torch adds to the norm before it divides by it."""


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients of a context so that their total norm is at most ``max_norm``. Blocks.

    Call it between the backward pass and the optimizer's step. Sparse gradients count like the
    equivalent dense gradients. Parameters without a gradient in the context are skipped.

    Args:
        context_id: The context.
        params_rref: References to the parameters, on this and other workers.
        max_norm: The largest total norm.
        norm_type: The p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the total is infinite or NaN, instead of scaling
            by it.

    Returns:
        The total norm before scaling, a scalar tensor on the CPU; 0 without gradients.

    Raises:
        ConfigurationError: A parameter is not a reference, or occurs twice; ``max_norm`` is
            negative, or ``norm_type`` is not positive.
        AutogradError: There is no such context here.
        OptimizerError: An owner failed, or the total is not finite; in the latter case nothing
            was scaled.
        WorkerLost: An owner is lost.
    """
    references = read_references(params_rref)
    max_norm, norm_type = check_norms(max_norm, norm_type)
    engine = current_engine()
    engine.contexts.get(context_id)
    with enter(context_id):
        total = norm_of(measure_remotely([context_id], references, norm_type), norm_type)
        coefficient = coefficient_of(total, max_norm, error_if_nonfinite=error_if_nonfinite)
        if coefficient is not None:
            scale_remotely(context_id, references, coefficient)
    return total


Members = list[tuple[int, Address]]


def measure_remotely(
    contexts: Sequence[int], references: Iterable[RRef[Any]], norm_type: float
) -> list[Tensor]:
    """Returns the norms of gradients, averaged over contexts, in the order of the parameters.

    Blocks for a call to each owner. A parameter counts as zero in a context in which it has no
    gradient, and is left out if it has none in any.

    Args:
        contexts: Each of one backward pass, for instance of each trainer.
        references: References to the parameters.
        norm_type: The p of the p-norm.

    Raises:
        OptimizerError: An owner failed.
        WorkerLost: An owner is lost.
    """
    given = {own: (list(contexts), at, norm_type) for own, at in _addresses(references).items()}
    answers, failures = run_on_owners(norms, given)
    raise_failures("measuring gradients", failures)
    by_position: dict[int, Tensor] = {}
    for positions, measured in answers.values():
        by_position.update(zip(positions, measured.unbind(), strict=True))
    return [by_position[position] for position in sorted(by_position)]


def scale_remotely(context_id: int, references: Iterable[RRef[Any]], coefficient: Tensor) -> None:
    """Multiplies the gradients of a context, in place. Blocks for a call to each owner.

    Args:
        context_id: The context.
        references: References to the parameters.
        coefficient: The factor, a tensor without dimensions.

    Raises:
        OptimizerError: An owner failed.
        WorkerLost: An owner is lost.
    """
    given = {own: (context_id, at, coefficient) for own, at in _addresses(references).items()}
    _, failures = run_on_owners(scale, given)
    raise_failures("scaling gradients", failures)


def _addresses(references: Iterable[RRef[Any]]) -> dict[int, Members]:
    """Returns the positions and addresses of parameters, by the id of their owner."""
    return {
        owner: [(position, address_of(reference)) for position, reference in members]
        for owner, members in by_owner(references).items()
    }


def check_norms(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Returns both as numbers.

    Raises:
        ConfigurationError: One of them cannot work.
    """
    try:
        if isinstance(max_norm, str) or isinstance(norm_type, str):
            raise TypeError  # ``float`` reads numbers in texts, too.
        max_norm, norm_type = float(max_norm), float(norm_type)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"max_norm is {max_norm!r}, and norm_type is {norm_type!r}; pass numbers"
        ) from None
    if not max_norm >= 0:
        raise ConfigurationError(f"max_norm is {max_norm}; it is at least 0")
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type is {norm_type}; it is greater than 0, or math.inf")
    return max_norm, norm_type


def coefficient_of(total: Tensor, max_norm: float, *, error_if_nonfinite: bool) -> Tensor | None:
    """Returns the factor of all gradients; None if they are left as they are.

    Raises:
        OptimizerError: The total is not finite, and that is an error.
    """
    if error_if_nonfinite and not bool(total.isfinite()):
        raise OptimizerError(
            f"the total norm of the gradients is {total.item()}, so they cannot be clipped; look "
            "for the operation that made them so, or pass error_if_nonfinite=False"
        )
    coefficient = max_norm / (total + _DIVISION_GUARD)
    return None if bool(coefficient >= 1) else coefficient


def norm_of(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Returns the norm of a whole from the norms of its parts; 0 without parts."""
    if not norms:
        return torch.tensor(0.0, device="cpu")
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


def on_host(scalars: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors with one element on the CPU, in order; each device is waited for once."""
    found = list(scalars)
    by_device: dict[torch.device, list[int]] = {}
    for place, scalar in enumerate(found):
        if not scalar.is_cpu:
            by_device.setdefault(scalar.device, []).append(place)
    for places in by_device.values():
        moved = torch.stack([found[place] for place in places]).cpu()
        for place, scalar in zip(places, moved.unbind(), strict=True):
            found[place] = scalar
    return found


def norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Returns the norm of one gradient, dense or sparse."""
    values = _values(gradient.coalesce() if gradient.is_sparse else gradient)
    if not values.numel():
        return values.new_zeros(())
    measured: Tensor = torch.linalg.vector_norm(values, norm_type)
    return measured


def _values(gradient: Tensor) -> Tensor:
    """Returns the values of a gradient, sharing its memory."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.is_sparse else gradient.values()


# Functions that owners run; called by name.


@remotely_callable
@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def norms(contexts: list[int], members: Members, norm_type: float) -> tuple[list[int], Tensor]:
    """Returns the norms of gradients of this worker, with the positions of their parameters."""
    check_types(contexts=(contexts, list), norm_type=(norm_type, float))
    found: dict[int, Tensor] = {}
    for context_id in contexts:
        check_types(context_id=(context_id, int))
        # A pass that has not come here has left no gradients.
        with contextlib.suppress(AutogradError):
            for place, gradient in _gradients(context_id, members).items():
                found[place] = gradient if place not in found else found[place] + gradient
    if len(contexts) > 1:
        found = {place: total / len(contexts) for place, total in found.items()}
    measured = on_host([norm(gradient, norm_type) for gradient in found.values()])
    return list(found), torch.stack(measured) if measured else torch.empty(0, device="cpu")


@remotely_callable
@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def scale(context_id: int, members: Members, coefficient: Tensor) -> None:
    """Multiplies gradients of this worker, in place."""
    check_types(context_id=(context_id, int), coefficient=(coefficient, Tensor))
    if coefficient.dim() or not coefficient.is_floating_point():
        raise ArgumentTypeError(
            "gradients are scaled by a real number, a tensor without dimensions"
        )
    coefficient = coefficient.cpu()  # A number of the host goes with the kernel, without a copy.
    for gradient in _gradients(context_id, members).values():
        _values(gradient).mul_(coefficient)


def _gradients(context_id: int, members: Members) -> dict[int, Tensor]:
    """Returns gradients of a context by the position of their parameters."""
    check_types(members=(members, list))
    gradients = get_gradients(context_id)
    found = {}
    for member in members:
        check_types(member=(member, tuple))
        position, address = member
        # A parameter that is still being made was in no backward pass.
        parameter = value_at(address)
        # Do not look up other values: their hash may be code of the program.
        gradient = gradients.get(parameter) if isinstance(parameter, Tensor) else None
        if gradient is not None:
            found[position] = gradient
    return found
