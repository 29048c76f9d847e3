"""Further values of small calls: functions by name, and references that go home.

Programs written for PyTorch's RPC call methods of remote objects through their own function, which
takes the method and the reference to the object. So both kinds are as common as tensors.
A reference goes home, to the owner of its value, without a handover: the caller keeps its own
reference until the call has ended.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torchweft.agent.peers import Peer
from torchweft.agent.references import ReferenceKeeper
from torchweft.errors import ProtocolError, ReferenceGone
from torchweft.ids import ReferenceId
from torchweft.rpc.handles import Handle
from torchweft.serialize.functions import name_of
from torchweft.serialize.reading import Reader

_REFERENCE = struct.Struct("<qqq")
_FUNCTION, _HOMECOMER = b"f", b"r"
_FUNCTION_TYPES = (FunctionType, BuiltinFunctionType, type)


def encoder(peer: Peer) -> Callable[[Any], bytes | None]:
    """Returns the encoder of such values for calls to ``peer``."""

    def encode(value: Any) -> bytes | None:
        if isinstance(value, Handle):
            if value.id.owner != peer.id:
                return None
            value.check_travels()
            return _HOMECOMER + _REFERENCE.pack(*value.id)
        if isinstance(value, _FUNCTION_TYPES):
            name = name_of(value, peer.main_by_name)
            return None if name is None else _FUNCTION + name
        return None

    return encode


def decoder(
    reader: Reader, references: ReferenceKeeper, reference_type: type[Handle]
) -> Callable[[bytes], Any]:
    """Returns the decoder of such values.

    Args:
        reader: Finds the functions.
        references: Counts the references that arrive.
        reference_type: Class of the references.
    """
    resolve = reader.resolve

    def decode(data: bytes) -> Any:
        if data[:1] == _FUNCTION:
            return resolve(data[1:])
        if data[:1] != _HOMECOMER or len(data) != 1 + _REFERENCE.size:
            raise ProtocolError(f"a message has a value of unknown kind: {data[:20]!r}")
        reference = ReferenceId(*_REFERENCE.unpack_from(data, 1))
        if not references.came_home(reference):
            raise ReferenceGone(f"{reference} arrived after this worker had dropped its references")
        return reference_type.from_received(references, reference)

    return decode
