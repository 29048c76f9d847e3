"""The measurements of a model, layer by layer: the input of the planner."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchweft.pipeline.errors import PartitionError
from torchweft.pipeline.partition.text import aligned, bytes_text, seconds_text

_FORMAT = "torchweft pipeline profile 1"


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Time and memory of one layer for one micro-batch.

    Attributes:
        name: Name for tables and errors, such as ``"0:Conv2d"``.
        forward_seconds: Time of the forward pass.
        backward_seconds: Time of the backward pass, for gradients of input and weights.
        activation_bytes: Size of the output, which is sent if the next layer is on another worker.
            The gradient that comes back has the same size.
        saved_bytes: Activations that the backward pass needs, held from forward to backward.
        weight_bytes: Size of the parameters that are trained.
        fixed_bytes: Size of frozen parameters and buffers: held once, never exchanged.
        optimizer_ratio: Bytes of optimizer state for each byte of ``weight_bytes``, such as 2 for
            Adam, 1 for SGD with momentum; None if not known, which counts as 0.

    Raises:
        PartitionError: If a number is negative, infinite or not a number.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    saved_bytes: int
    weight_bytes: int
    fixed_bytes: int = 0
    optimizer_ratio: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PartitionError(
                    f"layer {self.name!r} has {field.name}={value}; it must be finite, 0 or more"
                )

    @property
    def compute_seconds(self) -> float:
        """Time of forward and backward pass together."""
        return self.forward_seconds + self.backward_seconds

    @property
    def optimizer_bytes(self) -> int:
        """Size of the optimizer's state, rounded up; 0 if not known."""
        return math.ceil(self.weight_bytes * (self.optimizer_ratio or 0))


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model in order, as measured by ``profile`` or written by hand.

    Attributes:
        layers: The layers; at least one.
        batch_size: Number of samples in the micro-batch that was measured.

    Raises:
        PartitionError: If there is no layer, or the batch is empty.
    """

    layers: tuple[LayerProfile, ...]
    batch_size: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise PartitionError("the profile has no layers; it needs at least one")
        if self.batch_size < 1:
            raise PartitionError(
                f"the profile has batch_size={self.batch_size}; it must be 1 or more samples"
            )

    def to_json(self) -> str:
        """Returns the profile as JSON text, one layer a line."""
        lines = ",\n  ".join(json.dumps(asdict(layer)) for layer in self.layers)
        head = f'"format": "{_FORMAT}", "batch_size": {self.batch_size}'
        return f'{{{head}, "layers": [\n  {lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Returns the profile that ``to_json`` wrote.

        Raises:
            PartitionError: If the text is not a profile.
        """
        data = read_json(text, _FORMAT)
        try:
            layers = tuple(LayerProfile(**layer) for layer in data["layers"])
            return cls(layers, data["batch_size"])
        except (KeyError, TypeError) as error:
            raise PartitionError(f"this JSON is not a profile: {error!r}") from error

    def table(self) -> str:
        """Returns an aligned table with a line for each layer, and their sums."""
        header = ["", "layer", "forward", "backward", "output", "saved", "weights", "fixed"]
        rows = [
            [str(number), layer.name, *self._cells([layer])]
            for number, layer in enumerate(self.layers)
        ]
        rows.append(["", "all", *self._cells(self.layers)])
        return aligned(header, rows, left=["layer"])

    def __str__(self) -> str:
        return f"Profile of {len(self.layers)} layers, batch of {self.batch_size}\n{self.table()}"

    @staticmethod
    def _cells(layers: tuple[LayerProfile, ...] | list[LayerProfile]) -> list[str]:
        return [
            seconds_text(sum(layer.forward_seconds for layer in layers)),
            seconds_text(sum(layer.backward_seconds for layer in layers)),
            bytes_text(sum(layer.activation_bytes for layer in layers)),
            bytes_text(sum(layer.saved_bytes for layer in layers)),
            bytes_text(sum(layer.weight_bytes for layer in layers)),
            bytes_text(sum(layer.fixed_bytes for layer in layers)),
        ]


def read_json(text: str, format_name: str) -> Mapping[str, Any]:
    """Returns the object that a JSON text of the named format holds."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PartitionError(f"this text is not JSON: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != format_name:
        raise PartitionError(f'this JSON has the format {found!r}; expected "{format_name}"')
    return data  # type: ignore[no-any-return]
