"""Tensors that stand for tensors on a GPU, where there is none."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class OnGpu(Tensor):
    """A tensor that is read on the host only after ``cpu()``, as those of a GPU are."""

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor)


def on_gpu(tensor: Tensor) -> Tensor:
    """Returns a tensor as if it were on a GPU."""
    return tensor.as_subclass(OnGpu)
