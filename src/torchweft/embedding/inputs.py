"""Brings the inputs of a lookup into one form, and checks them before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchweft.embedding.configs import Shard, TableConfig
from torchweft.embedding.errors import BadIds, BadOffsets, IdOutOfRange

_INTEGERS = (torch.int64, torch.int32)


class Jagged(NamedTuple):
    """Bags of different lengths; the arguments of ``nn.EmbeddingBag``.

    Attributes:
        ids: Ids of all bags ``(n,)``; or ``(bags, length)`` without offsets.
        offsets: Where each bag begins in ``ids``, ``(bags,)``.
        per_sample_weights: A factor for each id, in the shape of ``ids``; for sums only.
        include_last_offset: Whether ``offsets`` ends with the number of ids, and so has one entry
            more than there are bags.
    """

    ids: Tensor
    offsets: Tensor | None = None
    per_sample_weights: Tensor | None = None
    include_last_offset: bool = False


def parts_of(nested: Any) -> tuple[Tensor, Tensor]:
    """Returns ids and offsets of a nested tensor with the layout ``torch.jagged``.

    One that was cut out of a padded tensor has lengths, and its values hold the padding as well.
    """
    if nested.lengths() is not None:
        nested = nested.contiguous()
    return nested.values(), nested.offsets()


class Flat(NamedTuple):
    """Checked ids of one table.

    Attributes:
        ids: Ids ``(n,)``, int64, on the CPU, without those that do not count.
        offsets: Where each bag begins; None where each id is a bag of its own.
        shape: Shape of the output without its last dimension.
        weights: A factor for each id, or None.
        device: Where the output belongs.
        length: The number of ids in each bag, if it is the same by form; else 0.
    """

    ids: Tensor
    offsets: Tensor | None
    shape: tuple[int, ...]
    weights: Tensor | None
    device: torch.device
    length: int = 0

    @property
    def n_ids(self) -> int:
        """The number of ids."""
        return self.ids.shape[0]

    @property
    def bags(self) -> int:
        """The number of bags."""
        return self.n_ids if self.offsets is None else self.offsets.shape[0]

    def lengths(self) -> Tensor:
        """Returns the number of ids in each bag."""
        if self.offsets is None or self.length:
            return torch.full((self.bags,), self.length, device="cpu")
        return torch.diff(self.offsets, append=self.offsets.new_tensor([self.n_ids]))

    def numbers(self, order: Tensor | None = None) -> Tensor:
        """Returns the number of its bag for each id, the ids in some order."""
        if self.length:
            ids = torch.arange(self.n_ids, device="cpu") if order is None else order
            return ids if self.length == 1 else ids.div(self.length, rounding_mode="floor")
        bags = torch.arange(self.bags, device="cpu")
        numbers = bags.repeat_interleave(self.lengths(), output_size=self.n_ids)
        return numbers if order is None else numbers.index_select(0, order)


class Checker:
    """Checks the inputs of one table.

    Args:
        config: The table.
        shards: Its shards, whose servers are named in messages.
    """

    def __init__(self, config: TableConfig, shards: Sequence[Shard] = ()) -> None:
        self.config = config
        self._shards = shards
        servers = _names(shards)
        self._fields = {"table": config.name, "server": servers}
        self._form, self._fixed = (0, 0), torch.empty(0, dtype=torch.int64, device="cpu")
        self._where = f"table {config.name!r} on {servers}" if servers else f"table {config.name!r}"

    def flat(self, value: Any) -> Flat:
        """Returns the ids of an input.

        Args:
            value: A tensor of ids; ``Jagged`` or a tuple with its parts; or a nested tensor with
                the layout ``torch.jagged``.

        Raises:
            BadIds: Ids or weights are of a wrong type or shape.
            BadOffsets: Offsets do not begin at 0, do not rise, or go beyond the ids.
            IdOutOfRange: The table has no such row.
        """
        jagged = self._jagged(value)
        ids = self._integers(jagged.ids, "ids")
        weights = self._weights(jagged)
        if self.config.pooling == "none":
            if jagged.offsets is not None:
                self._refuse("offsets were passed, and its pooling is 'none'")
            flat = Flat(ids.reshape(-1), None, tuple(ids.shape), None, jagged.ids.device, 1)
        else:
            offsets = self._offsets(ids, jagged)
            length = ids.shape[1] if jagged.offsets is None else 0
            shape = (offsets.shape[0],)
            flat = Flat(ids.reshape(-1), offsets, shape, weights, jagged.ids.device, length)
        self._check_range(flat.ids)
        return self._without_padding(flat)

    def _jagged(self, value: Any) -> Jagged:
        if isinstance(value, Tensor):
            if not value.is_nested:
                return Jagged(value)
            if value.layout is not torch.jagged:
                self._refuse("a nested tensor has another layout than torch.jagged")
            return Jagged(*parts_of(value), include_last_offset=True)
        if isinstance(value, tuple) and 0 < len(value) <= len(Jagged._fields):
            return Jagged(*value)
        self._refuse(f"a {type(value).__name__} was passed; pass a tensor of ids, or Jagged")

    def _integers(self, tensor: Any, what: str) -> Tensor:
        if not isinstance(tensor, Tensor):
            self._refuse(f"{what} is a {type(tensor).__name__}, not a tensor")
        if tensor.dtype not in _INTEGERS or tensor.layout is not torch.strided or tensor.is_meta:
            form = "" if tensor.layout is torch.strided else f" with the layout {tensor.layout}"
            form += " on meta" * tensor.is_meta
            self._refuse(
                f"{what} has {tensor.dtype}{form}; use a dense tensor of torch.int64 or int32"
            )
        # Most ids are so: each operation of torch takes as long as some hundred ids.
        if tensor.dtype is torch.int64 and tensor.device.type == "cpu":
            return tensor
        return tensor.to(device="cpu", dtype=torch.int64)

    def _weights(self, jagged: Jagged) -> Tensor | None:
        weights = jagged.per_sample_weights
        if weights is None:
            return None
        if self.config.pooling != "sum":
            self._refuse(f"weights were passed, and its pooling is {self.config.pooling!r}")
        if not isinstance(weights, Tensor) or weights.shape != jagged.ids.shape:
            shape = list(getattr(weights, "shape", ()))
            self._refuse(f"weights of shape {shape} do not match {list(jagged.ids.shape)} of ids")
        if weights.dtype != self.config.dtype:
            self._refuse(f"weights have {weights.dtype}, and its rows {self.config.dtype}")
        return weights.reshape(-1).cpu()

    def _offsets(self, ids: Tensor, jagged: Jagged) -> Tensor:
        if jagged.offsets is None:
            if ids.dim() != 2:
                self._refuse(
                    f"ids have {ids.dim()} dimensions; pass (bags, length), or offsets with "
                    "ids of one dimension"
                )
            return self._fixed_offsets(*ids.shape)
        if ids.dim() != 1:
            self._refuse(f"ids have {ids.dim()} dimensions; with offsets they have one")
        offsets = self._integers(jagged.offsets, "offsets")
        if offsets.dim() != 1:
            self._refuse(f"offsets have {offsets.dim()} dimensions, not one")
        self._check_offsets(offsets, len(ids), jagged.include_last_offset)
        return offsets[:-1] if jagged.include_last_offset else offsets

    def _fixed_offsets(self, bags: int, length: int) -> Tensor:
        """Returns where bags of equal length begin; the same tensor as long as the form is."""
        if self._form != (bags, length):
            # A tensor that is made in inference mode could not be used in training afterwards.
            with torch.inference_mode(mode=False):
                fixed = torch.arange(bags, device="cpu") * length
            self._form, self._fixed = (bags, length), fixed
        return self._fixed

    def _check_offsets(self, offsets: Tensor, count: int, has_last: bool) -> None:
        reason = ""
        if not len(offsets):
            reason = "there are none" if count or has_last else ""
        elif offsets[0] != 0:
            reason = f"they begin with {int(offsets[0])}, not 0"
        elif bool((offsets[1:] < offsets[:-1]).any()):
            place = int((offsets[1:] < offsets[:-1]).nonzero()[0])
            pair = offsets[place : place + 2].tolist()
            reason = f"offset {place + 1} is {pair[1]}, below the one before it, {pair[0]}"
        elif int(offsets[-1]) > count or (has_last and int(offsets[-1]) != count):
            reason = f"the last is {int(offsets[-1])}, and there are {count} ids"
        if reason:
            raise BadOffsets(f"offsets for {self._where} cannot be used: {reason}", **self._fields)

    def _check_range(self, ids: Tensor) -> None:
        if not ids.shape[0] or self.config.dynamic is not None:
            return
        low, high = (int(each) for each in torch.aminmax(ids))
        if low >= 0 and high < self.config.rows:
            return
        position = int(((ids < 0) | (ids >= self.config.rows)).nonzero()[0])
        number = int(ids[position])
        # The rows of a shard go on beyond the table; so do those of a row that it has not.
        owners = [each for each in self._shards if (number - each.rows.start) % each.rows.step == 0]
        server = _names(owners)
        where = f"table {self.config.name!r}{f' on {server}' if server else ''}"
        raise IdOutOfRange(
            f"id {number} at position {position} is not in {where}, "
            f"which has the ids 0 to {self.config.rows - 1}",
            id=number,
            position=position,
            table=self.config.name,
            server=server,
        )

    def _without_padding(self, flat: Flat) -> Flat:
        """Removes ids that do not count from bags."""
        padding = self.config.padding_idx
        if padding is None or flat.offsets is None:
            return flat
        counts = flat.ids != padding
        before = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        weights = None if flat.weights is None else flat.weights[counts]
        return flat._replace(
            ids=flat.ids[counts],
            offsets=before.index_select(0, flat.offsets),
            weights=weights,
            length=0,
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise BadIds(f"{self._where} cannot be looked up: {reason}", **self._fields)


def _names(shards: Sequence[Shard]) -> str:
    return ", ".join(dict.fromkeys(each.server for each in shards))
