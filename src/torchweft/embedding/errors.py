"""Errors of embedding tables: their input, their plan, and servers that do not match.

::

    ConfigurationError
    ├── InputError                     ids, offsets or weights of a lookup cannot be used
    │   ├── BadIds (TypeError)         of a wrong type or shape
    │   ├── IdOutOfRange (IndexError)  a table has no such row
    │   ├── CapacityError              a step has more ids of a dynamic table than fit on a server
    │   └── BadOffsets                 they do not rise, or do not fit the ids
    ├── PlanError                      shards do not cover a table, or a table cannot be placed so
    ├── TablesMismatch                 a server has other tables under the same name
    └── StepError (RuntimeError)       a trainer is not at the step that a server expects
"""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import ArgumentTypeError, ConfigurationError


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class InputError(ConfigurationError):
    """The input of a lookup cannot be used; nothing was sent, and no row has changed.

    Attributes:
        table: Name of the table.
        server: Names of the servers that hold it, or of the server that refused the message.
    """

    table: str = ""
    server: str = ""


class BadIds(InputError, ArgumentTypeError):
    """Ids or weights have a type or a shape that no table takes."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class IdOutOfRange(InputError, IndexError):
    """A table has no row for an id.

    Attributes:
        id: The first such id.
        position: Its position in the flattened ids.
    """

    id: int = 0
    position: int = 0


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class CapacityError(InputError):
    """A step has more ids of a dynamic table than a server has rows for.

    Attributes:
        count: How many ids a trainer's step has on that server.
        limit: How many it may have: the server's rows, divided by the trainers.
    """

    count: int = 0
    limit: int = 0


class BadOffsets(InputError):
    """Offsets do not begin at 0, do not rise, or go beyond the ids."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PlanError(ConfigurationError):
    """Tables cannot be placed as requested.

    Attributes:
        table: Name of the table.
    """

    table: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class TablesMismatch(ConfigurationError):
    """A server holds a collection of this name that was made otherwise; it stays as it is.

    Attributes:
        server: Name of the server.
        part: The part that differs: the name of a table, or of an option.
    """

    server: str = ""
    part: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class StepError(ConfigurationError, RuntimeError):
    """A trainer sent a step that a server does not expect.

    Attributes:
        server: Name of the server.
        trainer: Name of the trainer.
        step: The step that was sent, counted from 0.
        expected: The step that the server expects of this trainer.
    """

    server: str = ""
    trainer: str = ""
    step: int = 0
    expected: int = 0
