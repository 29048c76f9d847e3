"""The format of a plain payload.

The payload of a message is either a pickle or plain, and its first byte says which: every pickle of
Weft begins with 0x80, a plain payload with ``MARK``. The kinds of plain values are a closed list,
and decoding makes these values and nothing else. No class defines how it is read, and a NAME is
looked up by the rules of the worker, as for a call. Tensors and references stay outside, as they do
for a pickle, and a number replaces each. So large tensors travel by the same channels, and views of
one memory go on sharing it. Tensors are dense; a sparse tensor of coordinates is MADE of dense
tensors, and checked. An attribute never hides a member of its class: the code that uses the value
would call it.

Layout, little-endian: ``MARK``, then one value as a tag (u8) and what follows it::

    NONE, TRUE, FALSE           -
    INTEGER                     size u32 · two's complement
    FLOAT, COMPLEX              f64, two f64
    TEXT, BYTES                 size u32 · the bytes (text in UTF-8)
    TUPLE, LIST, SET, FROZENSET number of values u32 · the values
    DICTIONARY, ORDERED         number of entries u32 · key and value of each; an ORDERED one has
                                its attributes, a DICTIONARY, behind it
    AGAIN                       number u32 of a list, set or dict that came before
    TENSOR, REFERENCE           number u32
    ATTRIBUTED                  a tensor · its attributes, a DICTIONARY
    TORCH                       a text: the name of a dtype, layout, memory format or device
    SIZE                        a TUPLE of integers
    NAME                        a text: module and name of a function or class
    MADE                        a text: a name marked ``rebuilds_plain`` · its arguments, a TUPLE
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from torchweft.errors import ProtocolError

MARK = 1
"""First byte of a plain payload."""

(NONE, TRUE, FALSE, INTEGER, FLOAT, COMPLEX, TEXT, BYTES, TUPLE, LIST, SET, FROZENSET) = range(12)
(DICTIONARY, ORDERED, AGAIN, TENSOR, REFERENCE, ATTRIBUTED) = range(12, 18)
(TORCH, SIZE, NAME, MADE) = range(18, 22)

DEPTH_LIMIT = 150
"""How deeply values may be nested."""

NUMBER = struct.Struct("<BI")
FLOAT_VALUE = struct.Struct("<Bd")
COMPLEX_VALUE = struct.Struct("<Bdd")


def check_attributes(kind: type, attributes: Mapping[str, object]) -> None:
    """Raises ProtocolError if attributes of an object would hide members of its class."""
    for name in attributes:
        if type(name) is not str or hasattr(kind, name) or name.startswith("__"):
            raise ProtocolError(
                f"attribute {name!r} of a {kind.__name__} cannot travel without pickle: it would "
                "hide something of the class; give it another name"
            )
