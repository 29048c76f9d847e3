from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchweft.ids import ReferenceId

def set_dtypes(dtypes: Sequence[tuple[int, int, int, bool, bool]]) -> None: ...
def set_value_parts(
    rebuild: Callable[[int, Any, Any], Any], reference_type: type[ReferenceId]
) -> None: ...
def encode_tensors(tensors: Sequence[Tensor]) -> tuple[bytes, bool] | None: ...
def decode_tensors(
    data: bytes | bytearray | memoryview, position: int
) -> tuple[list[Tensor], list[int]] | None: ...
def encode_values(
    value: object,
    tensors: list[Tensor],
    name_of: Callable[[Any], bytes | None],
    home_of: Callable[[Any], ReferenceId | None],
) -> bytes | None: ...
def decode_values(
    data: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    externals: Sequence[object],
    resolve: Callable[[bytes], Any],
    come_home: Callable[[ReferenceId], Any],
) -> Any: ...
