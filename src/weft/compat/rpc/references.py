"""``RRef`` with what programs use of it beyond the documented API."""

from __future__ import annotations

from weft.rpc import RRef

PyRRef = RRef
