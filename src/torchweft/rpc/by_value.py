"""Packs calls of functions that go by value, so that their code is sent to each peer once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.agent.code_keeping import CodeKeeper
from torchweft.agent.peers import Peer
from torchweft.ids import ReferenceId
from torchweft.protocol.kept_code import SentCode
from torchweft.serialize.by_value import Code, take_apart
from torchweft.serialize.functions import name_of
from torchweft.serialize.objects import Packed, pack_by_name
from torchweft.serialize.reducers import is_dense
from torchweft.serialize.values import encode, no_home
from torchweft.wire.messages import CAPTURED, POSITIONAL


class PackedCall(NamedTuple):
    """The value of a call.

    Attributes:
        packed: Its parts.
        flags: How the callee reads it.
        entries: The code that it names; the callee keeps the code as long as these are held.
    """

    packed: Packed
    flags: int
    entries: Sequence[SentCode] = ()


def pack_function(
    keeper: CodeKeeper,
    peer: Peer,
    packer: Callable[..., Packed],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    home_of: Callable[[Any], ReferenceId | None],
) -> PackedCall:
    """Packs a function that goes by value, and its arguments, for a peer that keeps code.

    Args:
        keeper: Sends the code.
        peer: The callee.
        packer: Packs for this peer, as ``objects.pack`` does.
        function: The function, or another callable without a name.
        args: Positional arguments.
        kwargs: Keyword arguments.
        home_of: Returns the address of a reference that goes home; see ``values.encode``.

    Raises:
        SerializationError: The callable or an argument cannot be serialized.
    """
    codes: list[Code] = []
    parts = None
    if type(function) is FunctionType:
        try:
            parts = take_apart(function)
        except Exception:
            pass  # Its annotations run code of the program; the pickler reports the error.
    if parts is not None:
        codes.append(parts[0])  # The called function comes first; ``serving`` relies on it.
        packed = _pack_parts(keeper, peer, function, parts, args, kwargs, home_of)
        if packed is not None:
            return packed
    whole = packer((args, kwargs, function), codes=codes)
    entries = keeper.lend(peer, codes)
    if entries is None:
        return PackedCall(packer((args, kwargs, function)), 0)
    return PackedCall(whole, 0, entries)


def _pack_parts(
    keeper: CodeKeeper,
    peer: Peer,
    function: Callable[..., Any],
    parts: tuple[Code, list[Any]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    home_of: Callable[[Any], ReferenceId | None],
) -> PackedCall | None:
    """Packs the captured values of a function like arguments, in front of its own.

    Returns None if anything else goes by value: it may refer to the function, or share globals with
    it, and only one pickle keeps that.
    """
    code, captured = parts
    by_name = peer.main_by_name
    if function.__dict__:
        return None
    for each in captured:
        if type(each) is FunctionType and name_of(each, by_name) is None:
            return None
    entries = keeper.lend(peer, (code,))
    if entries is None:
        return None
    values = (*captured, *args)
    if not kwargs:
        tensors: list[Tensor] = []
        if captured:
            home_of = no_home  # The caller keeps its arguments, but not its function.
        payload = encode(values, tensors, by_name, home_of)
        if payload is not None and (not tensors or all(map(is_dense, tensors))):
            return PackedCall(Packed(payload, tensors, []), POSITIONAL | CAPTURED, entries)
    packed = pack_by_name((values, kwargs) if kwargs else values, main_by_name=by_name)
    if packed is None:
        return None
    return PackedCall(packed, CAPTURED if kwargs else POSITIONAL | CAPTURED, entries)
