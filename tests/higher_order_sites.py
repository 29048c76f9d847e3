"""The sites on which higher-order gradient programs run, and a model of them in one process.

A program is a function of the site that it runs on. It calls functions at other sites, each of
which gets its own site as its first argument. So one program runs on real workers, on workers in
one process, and on plain autograd, which gives the expected result.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

WORKERS = 3
Tables = dict[tuple[int, str], Tensor]
"""Gradients by worker and name of the parameter."""

Tensors = Tensor | Sequence[Tensor]


_kind: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}


def use(device: torch.device | str, dtype: torch.dtype) -> None:
    """Makes the parameters of later programs of this process on a device, of a type."""
    _kind.update(device=device, dtype=dtype)


def initial(worker: int, name: str, *shape: int) -> torch.nn.Parameter:
    """Returns a new parameter, the same for the same names everywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{worker} {name}".encode()))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.Parameter(drawn.to(**_kind))


class Site:
    """A worker, as far as a program sees it.

    Attributes:
        worker: Its number.
        state: The state that its functions keep between calls.
    """

    worker: int
    state: dict[str, Any]

    def parameter(self, name: str, *shape: int) -> torch.nn.Parameter:
        """Returns a parameter of this worker; a vector of three by default."""
        raise NotImplementedError

    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function at another site and returns its result."""
        return self.start(worker, function, *arguments)()

    def start(
        self, worker: int, function: Callable[..., Any], *arguments: Any
    ) -> Callable[[], Any]:
        """Begins a call and returns a function that waits for its result."""
        raise NotImplementedError

    def grad(
        self,
        outputs: Tensors,
        inputs: Tensors,
        grad_outputs: Any = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
    ) -> tuple[Tensor, ...]:
        """Computes gradients as ``torch.autograd.grad`` does."""
        raise NotImplementedError

    def backward(
        self,
        roots: Sequence[Tensor],
        grad_tensors: Sequence[Tensor | None] | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Adds to the gradients of the parameters of all workers."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of this worker's parameters, by their names."""
        raise NotImplementedError


Program = Callable[[Site], Sequence[Tensor | None]]
Outcome = tuple[list[Tensor | None], Tables]


class ModelSite(Site):
    """A worker that shares its process, and the graph, with the others."""

    def __init__(self, worker: int, sites: list[ModelSite]) -> None:
        self.worker = worker
        self.state = {}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.sums: dict[str, Tensor] = {}
        self._sites = sites

    def parameter(self, name: str, *shape: int) -> torch.nn.Parameter:
        if name not in self.parameters:
            self.parameters[name] = initial(self.worker, name, *(shape or (3,)))
        return self.parameters[name]

    def start(
        self, worker: int, function: Callable[..., Any], *arguments: Any
    ) -> Callable[[], Any]:
        other = self._sites[worker]
        if other is self:
            result = function(other, *arguments)
        else:
            result = _moved(function(other, *_moved(arguments)))
        return lambda: result

    def grad(
        self, outputs: Tensors, inputs: Tensors, grad_outputs: Any = None, **options: Any
    ) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, inputs, grad_outputs, **options)

    def backward(
        self,
        roots: Sequence[Tensor],
        grad_tensors: Sequence[Tensor | None] | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        # Not ``.grad``: autograd adds to it in place, although a graph may have saved it.
        leaves = [(s, name, leaf) for s in self._sites for name, leaf in s.parameters.items()]
        found = torch.autograd.grad(
            roots,
            [leaf for _, _, leaf in leaves],
            grad_tensors,
            retain_graph=retain_graph or create_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
        for (site, name, _), gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                earlier = site.sums.get(name)
                site.sums[name] = gradient if earlier is None else _sum(earlier, gradient)

    def gradients(self) -> dict[str, Tensor]:
        return dict(self.sums)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    return second + first if first.is_sparse and not second.is_sparse else first + second


def _moved(value: Any) -> Any:
    """Returns a value as another worker receives it, with copies of the tensors."""
    return moved_with(lambda tensors: [tensor.clone() for tensor in tensors], value)


def moved_with(send: Callable[[list[Tensor]], Sequence[Tensor]], value: Any) -> Any:
    """Returns a value with its tensors replaced; a repeated tensor stays one object."""
    leaves, structure = pytree.tree_flatten(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    sent = dict(zip(tensors, send(list(tensors.values())), strict=True))
    return pytree.tree_unflatten([sent.get(id(leaf), leaf) for leaf in leaves], structure)


def expected(program: Program) -> Outcome:
    """Returns a program's results and all gradients, computed in one process."""
    sites: list[ModelSite] = []
    sites += [ModelSite(worker, sites) for worker in range(WORKERS)]
    results = list(program(sites[0]))
    tables = {
        (site.worker, name): gradient for site in sites for name, gradient in site.sums.items()
    }
    return results, tables


def assert_equal(actual: Outcome, wanted: Outcome, tolerance: float, what: object = "") -> None:
    """Checks that the same results and gradients exist, and that they are close."""
    results, tables = actual
    wanted_results, wanted_tables = wanted
    assert len(results) == len(wanted_results), what
    for place, pair in enumerate(zip(results, wanted_results, strict=True)):
        _assert_close(*pair, tolerance, f"result {place} {what}")
    assert tables.keys() == wanted_tables.keys(), what
    for key, gradient in wanted_tables.items():
        _assert_close(tables[key], gradient, tolerance, f"{key} {what}")


def _assert_close(
    actual: Tensor | None, wanted: Tensor | None, tolerance: float, what: str
) -> None:
    assert (actual is None) == (wanted is None), what
    if actual is None or wanted is None:
        return
    assert actual.layout == wanted.layout, what
    torch.testing.assert_close(
        actual.detach().to_dense(),
        wanted.detach().to_dense(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )
