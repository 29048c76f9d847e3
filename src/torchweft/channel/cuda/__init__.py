"""Device memory between processes of one host; see ``docs/protocols/devices.md``."""

from torchweft.channel.cuda.driver import Driver, DriverError, find_driver
from torchweft.channel.cuda.exports import Exports, KnownHandles, Offered
from torchweft.channel.cuda.imports import CannotMap, Imports, NotReady, await_all

__all__ = [
    "CannotMap",
    "Driver",
    "DriverError",
    "Exports",
    "Imports",
    "KnownHandles",
    "NotReady",
    "Offered",
    "await_all",
    "find_driver",
]
