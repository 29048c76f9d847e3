"""Proxies of references, under their old name."""

from weft.rpc.proxies import Proxy as RRefProxy

__all__ = ["RRefProxy"]
