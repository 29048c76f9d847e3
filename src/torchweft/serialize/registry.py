"""The functions and classes of Weft that messages of other workers may name.

Each one carries a mark at its definition. A worker with an allow-list, and a strict worker, follow
a name into Weft only to a function or class with the required mark. Any worker of the group can
call a marked function with any arguments. So the function must only make a value, or check its
arguments: types, that functions are registered, and that objects were made for it.

A mark is set while the module of the function is imported, and a worker imports most modules when
the first message needs them. So each mark below lists the modules in which it may stand. A message
can cause the import of these modules, and no others; a mark in another module is an error at its
import. No message can set a mark.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torchweft import errors, ids
from torchweft.errors import ConfigurationError
from torchweft.serialize.functions import import_module

T = TypeVar("T")


class Mark:
    """A mark for functions and classes; used as the outermost decorator. Thread-safe.

    Args:
        modules: Modules in which the mark may stand.
    """

    def __init__(self, *modules: str) -> None:
        self.modules = frozenset(modules)
        self._names: set[str] = set()

    def __call__(self, member: T) -> T:
        """Sets the mark.

        Raises:
            ConfigurationError: The mark may not stand in this module.
        """
        marked: Any = member
        name = f"{marked.__module__}:{marked.__qualname__}"
        if marked.__module__ not in self.modules:
            raise ConfigurationError(
                f"{name} may not be marked for messages of others: its module is not on the list "
                f"of the mark in {__name__}"
            )
        self._names.add(name)
        return member

    def has(self, name: str) -> bool:
        """Tells whether ``module:name`` has the mark, and imports the module if it is listed.

        Raises:
            UnknownFunction: The module is listed and cannot be imported here.
        """
        if name in self._names:
            return True
        module, _, path = name.partition(":")
        if module in self.modules:
            import_module(module, path)
        return name in self._names


remotely_callable = Mark(
    "torchweft.mapreduce.ending",
    "torchweft.mapreduce.shared",
    "torchweft.nn.owner",
    "torchweft.optim.clipping",
    "torchweft.optim.local",
    "torchweft.rpc.collective",
    "torchweft.rpc.gathering.following",
    "torchweft.rpc.serving",
)
"""Workers of Weft call these functions on one another, on strict workers as well. They must check
their arguments: types, that functions are registered, and that objects were made for them."""

remotely_callable_unless_strict = Mark("torchweft.compat.rpc.api", "torchweft.compat.rpc.owners")
"""Workers of Weft call these functions on one another; a strict worker refuses them."""

rebuilds_plain = Mark(
    "torchweft.errors",
    "torchweft.ids",
    "torchweft.mapreduce.shared",
    "torchweft.nn.owner",
    "torchweft.nn.remote_module",
    "torchweft.optim.groups",
    "torchweft.optim.local",
    "torchweft.rpc.gathering.terms",
    "torchweft.serialize.reducers",
)
"""These rebuild an object of Weft, or a sparse tensor, from plain values; in pickles as well."""

rebuilds_pickled = Mark(
    "torchweft.compat.remote_module",
    "torchweft.serialize.exceptions",
    "torchweft.serialize.reducers",
)
"""These rebuild further kinds of objects, in pickles only."""

loads_script = Mark("torchweft.serialize.reducers")
"""These load compiled code, which is a program: only if ``torch.jit`` is allowed."""

has_callable_methods = Mark(
    "torchweft.nn.chain",
    "torchweft.nn.remote_module",
    "torchweft.optim.distributed",
    "torchweft.rpc.handles",
    "torchweft.rpc.rref",
)
"""With an allow-list, other workers may call these classes' methods on a referenced value."""

# These modules are below this one, and cannot import it.
for _member in (errors._rebuild_with_fields, ids.ReferenceId, ids.WorkerInfo):
    rebuilds_plain(_member)
