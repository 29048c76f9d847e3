"""Chains: a remote module's result is processed on its owner, and only the last result travels.

A decoder's logits have a row of the whole vocabulary for every word: 32 sequences of 64 words and
a vocabulary of 30,000 are 246 MB in float32, and their gradients as much again. The loss is four
bytes. So send the targets to the logits::

    loss = decoder.then(torch.nn.functional.cross_entropy, targets)(hidden)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.nn import owner
from torchweft.nn.owner import Step
from torchweft.rpc import Future, RRef, remote, rpc_async, rpc_sync
from torchweft.rpc.lives import info_of
from torchweft.serialize.registry import has_callable_methods


@has_callable_methods
class Chain:
    """Calls a remote module, then functions on its result, in one call to its owner.

    Made by ``RemoteModule.then``. A chain is immutable, so any threads may call it many times.
    Gradients flow through it as through any call of an autograd context: to parameters on the
    owner, and back to the caller's arguments of all its steps.

    Args:
        module: A reference to the module.
        device: The owner's device to which tensors among the arguments are moved.
        steps: The calls that follow the module.
    """

    def __init__(
        self, module: RRef[nn.Module], device: str = owner.HOST, steps: tuple[Step, ...] = ()
    ) -> None:
        self._module = module
        self._device = device
        self._steps = steps

    def then(self, function: Callable[..., Any] | RRef[Any], /, *args: Any, **kwargs: Any) -> Chain:
        """Returns a longer chain that ends with ``function(result so far, *args, **kwargs)``.

        Args:
            function: Any callable that can be sent, or a reference to a callable on the same
                owner: an ``RRef`` or a ``RemoteModule``.
            args: Further arguments of the function; they are sent with every call of the chain.
            kwargs: Keyword arguments of the function, sent likewise.

        Raises:
            ConfigurationError: ``function`` lives on another worker, or is not callable.
        """
        step = Step(self._checked(function), args, kwargs)
        return Chain(self._module, self._device, (*self._steps, step))

    def _checked(self, function: Any) -> Callable[..., Any] | RRef[Any]:
        function = getattr(function, "module_rref", function)
        if isinstance(function, RRef):
            if function.id.owner != self._module.id.owner:
                raise ConfigurationError(
                    f"{function!r} is not on worker {self._module.owner_name()!r}, where the chain "
                    "stays; call the two one after the other, or place them on one worker"
                )
        elif not callable(function):
            raise ArgumentTypeError(
                f"a chain cannot go on with {function!r}, a {type(function).__name__} that cannot "
                "be called; pass the function itself, and its further arguments behind it"
            )
        return function  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with these arguments, then the steps; returns the result. Blocks."""
        creator, owner_id, number = self._module.id
        address = (creator, owner_id, number)
        call = (address, self._device, self._steps, args, kwargs)
        return rpc_sync(info_of(owner_id), owner.run_at, call)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the chain and returns a future of its last result."""
        return rpc_async(info_of(self._module.id.owner), owner.run, self._call(args, kwargs))

    def forward_remote(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Starts the chain; returns a reference to its last result, which stays on the owner."""
        return remote(info_of(self._module.id.owner), owner.run, self._call(args, kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return self._module, self._device, self._steps, args, kwargs

    def __repr__(self) -> str:
        names = "".join(
            f".then({getattr(step.function, '__name__', step.function)})" for step in self._steps
        )
        return f"<Chain {self._module!r}{names}>"
