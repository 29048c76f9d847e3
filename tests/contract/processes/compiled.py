"""Functions that ``torch.jit`` compiles for tests of remote calls, in each importing process."""

# The compiler needs the types themselves, so their evaluation is not postponed here.

import warnings

import torch
from torch import Tensor
from torch.futures import Future

from torchweft.rpc.functions import async_execution

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Compiling is deprecated, but not gone.

    @torch.jit.script
    def product(first: Tensor, second: Tensor, times: int = 1) -> Tensor:
        return first * second * times

    @torch.jit.script
    def raising(value: Tensor) -> Tensor:
        if value.numel() == 2:
            raise ValueError("no pairs")
        return value

    @async_execution
    @torch.jit.script
    def product_later(first: Tensor, second: Tensor) -> Future[Tensor]:
        return torch.jit.fork(product, first, second)

    @torch.jit.script
    def square(value: Tensor) -> Tensor:
        """Takes some milliseconds: longer than a call that only starts it."""
        result = value * value
        for _ in range(3000):
            result = result + 0
        return result

    @async_execution
    @torch.jit.script
    def no_future(value: Tensor) -> Tensor:
        return value

    @torch.jit.interface
    class ScaleInterface:
        def forward(self, value: Tensor, times: int) -> tuple[Tensor, int]:
            pass

    @torch.jit.interface
    class RemoteScaleInterface:
        def forward(self, value: Tensor, times: int) -> tuple[Tensor, int]:
            pass

        def forward_async(self, value: Tensor, times: int) -> Future[tuple[Tensor, int]]:
            pass

    @torch.jit.interface
    class NoForward:
        def backward(self, value: Tensor) -> Tensor:
            pass

    @torch.jit.script
    class Pair:
        def __init__(self, first: int) -> None:
            self.first = first

    @torch.jit.interface
    class WithClass:
        def forward(self, pair: Pair) -> Tensor:
            pass

    @torch.jit.script
    def call_twice(module: ScaleInterface, value: Tensor) -> Tensor:
        once, times = module.forward(value, 2)
        return module.forward(once, times)[0]

    @torch.jit.script
    def overlap(module: RemoteScaleInterface, value: Tensor) -> Tensor:
        first = module.forward_async(value, 2)
        second = module.forward_async(value, 3)
        return first.wait()[0] + second.wait()[0]


def start_square(value: Tensor) -> Future[Tensor]:
    """Starts a function and does not wait for it."""
    return torch.jit.fork(square, value)
