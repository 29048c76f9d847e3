"""The errors that Weft raises, in one tree.

::

    WeftError
    ├── ConfigurationError (ValueError, RuntimeError)   an argument or option is wrong: change it
    │   ├── ArgumentTypeError (TypeError)      an argument is of a type that cannot work
    │   └── NotOwner (RuntimeError)            only the owner of a referenced value can do this
    ├── NotSupported (NotImplementedError)     Weft has no such thing; says what there is instead
    ├── NotInitialized (RuntimeError)          call init_rpc first, or the worker has shut down
    ├── AlreadyInitialized (RuntimeError)      init_rpc was called twice
    ├── RendezvousError (RuntimeError)         the workers could not find each other
    │   ├── RendezvousTimeout (TimeoutError)   some workers never came; names them
    │   └── DuplicateName                      two workers took the same name
    ├── UnknownWorker (RuntimeError, ValueError)   no worker has that name or rank
    ├── MethodNotFound (RuntimeError, AttributeError)   the referenced value has no such method
    ├── CallError (RuntimeError)               one call failed; others are not affected
    │   ├── CallTimeout (TimeoutError)         no answer within the call's timeout
    │   ├── CallCancelled                      the caller gave it up
    │   ├── CallRefused                        the callee would not start it
    │   │   ├── QueueFull                      too many calls of this worker wait there already
    │   │   └── NotAllowed                     a message names what its receiver does not allow
    │   ├── BatchError (ValueError)            a batch cannot be stacked, or its result split
    │   ├── SerializationError (TypeError)     an argument or result cannot travel
    │   ├── UnknownFunction (AttributeError)   the callee has no function of that name
    │   └── RemoteError                        the callee raised a type that cannot be rebuilt here
    ├── WorkerLost (ConnectionError, RuntimeError)   a worker died or cannot be reached
    │   └── OwnerLost                          the lost worker owned a referenced value
    ├── ReferenceGone (RuntimeError)           the referenced value was already released
    ├── ProtocolError (RuntimeError)           a peer sent what no Weft of this version sends
    │   └── TlsError (ConnectionError)         no secure connection with the peer; says why
    ├── AutogradError (RuntimeError)           a distributed backward pass cannot be run
    │   ├── BackwardLost (WorkerLost)          a worker was lost during the pass
    │   └── BackwardTimeout (TimeoutError)     it took too long; names the missing workers
    ├── OptimizerError (RuntimeError)          an optimizer failed on some worker; says which
    ├── ReduceError (RuntimeError)             the results of a map could not be put together
    ├── PipelineError (RuntimeError)           a stage of a pipeline failed; says which
    ├── CheckpointError (RuntimeError)         a snapshot could not be saved or restored
    │   ├── SnapshotNotFound (FileNotFoundError)   there is none, or a worker lacks a file of it
    │   ├── SnapshotCorrupt                    a file is not as written; names the other snapshots
    │   ├── BrokenChain                        an increment does not follow its base; names both
    │   └── StateMismatch (ValueError)         it does not match the state; says what differs
    ├── ObserveError (RuntimeError)            a group cannot be observed; says what to do
    │   ├── GroupNotFound (LookupError)        no such group runs here, or several do; lists them
    │   └── ObserverRefused (PermissionError)  its workers have another secret than this observer
    ├── ShutdownError (RuntimeError)           a graceful shutdown failed; names workers and cause
    └── LaunchError (RuntimeError)             worker processes could not be started, or one died
        └── HostError (ConnectionError)        a host cannot be reached, or cannot start workers

Each is also a subclass of the built-in exception that users of ``torch.distributed.rpc``
catch. Data that a program may want to act on is in fields, not only in the text.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, fields
from typing import Any


@dataclass(init=False, eq=False, repr=False, match_args=False)
class WeftError(Exception):
    """The root of every error that Weft itself raises.

    An error with fields declares them as a dataclass, each with a default. Its constructor takes
    the message first. Pickles and copies keep the fields and the notes, copies the cause as well.
    """

    message: InitVar[str]

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # The cause is left out, as by Python: with an unpicklable cause the error could not travel.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if not values:
            reduced: Any = super().__reduce__()
            return tuple(reduced)
        state = {name: value for name, value in vars(self).items() if name not in values}
        rebuilt = _rebuild_with_fields, (type(self), str(self), values)
        return (*rebuilt, state) if state else rebuilt

    def __copy__(self) -> WeftError:
        reduced: Any = self.__reduce_ex__(2)
        make, arguments, *states = reduced
        copy: WeftError = make(*arguments)
        for state in states:
            copy.__setstate__(state)
        if "__notes__" in vars(copy):
            vars(copy)["__notes__"] = list(vars(copy)["__notes__"])
        copy.__cause__ = self.__cause__
        copy.__context__ = self.__context__
        copy.__suppress_context__ = self.__suppress_context__
        return copy


class ConfigurationError(WeftError, ValueError, RuntimeError):
    """An argument or an option has a value that cannot work."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of a type that cannot work."""


class NotOwner(ConfigurationError, RuntimeError):
    """An operation on a reference was requested that only the owner of its value can do."""


class NotSupported(WeftError, NotImplementedError):
    """A feature of PyTorch's RPC was requested that has no meaning in Weft."""


class NotInitialized(WeftError, RuntimeError):
    """A call needs a worker that has joined its group, and this process has none."""


class AlreadyInitialized(WeftError, RuntimeError):
    """This process is a worker already."""


class RendezvousError(WeftError, RuntimeError):
    """The workers of a group could not agree on who they are."""


@dataclass(eq=False, repr=False, match_args=False)
class RendezvousTimeout(RendezvousError, TimeoutError):
    """Some workers did not come in time.

    Attributes:
        missing: Ranks that never arrived.
        elapsed_s: How long this worker waited, in seconds.
    """

    missing: tuple[int, ...] = ()
    elapsed_s: float = 0.0


class DuplicateName(RendezvousError):
    """Two workers of one group asked for the same name."""


class UnknownWorker(WeftError, RuntimeError, ValueError):
    """No worker of the group has that name, rank or description."""


class MethodNotFound(WeftError, RuntimeError, AttributeError):
    """The value behind a reference has no such method; raised by the caller, before any call."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class CallError(WeftError, RuntimeError):
    """One remote call failed.

    Attributes:
        worker: Name of the worker that was called, where it is known.
        call: Readable name of the function that was called, where it is known.
        elapsed_s: Seconds between the start of the call and the failure.
    """

    worker: str = ""
    call: str = ""
    elapsed_s: float = 0.0


class CallTimeout(CallError, TimeoutError):
    """A call had no answer within its timeout; the callee may still be running it."""


class CallCancelled(CallError):
    """A call was cancelled by its caller."""


class CallRefused(CallError):
    """The callee did not start the call, for instance because it is shutting down."""


class QueueFull(CallRefused):
    """Too many calls of this worker wait at the callee already; this one was not started."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class NotAllowed(CallRefused):
    """A message uses what its receiver does not allow: a function, a class, or any pickle at all.

    Raised to the caller: by the callee for the function and its arguments, or by the caller itself
    for the result. Nothing that was refused has been imported or run.

    Attributes:
        refused: What was refused.
    """

    refused: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BatchError(CallError, ValueError):
    """The arguments of batched calls cannot be stacked, or their common result cannot be split.

    Attributes:
        callers: Names of the workers whose calls are concerned, one for each call.
        shapes: Dtypes and shapes for each of these calls: of its arguments if they cannot be
            stacked, else of the result.
    """

    callers: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()


class SerializationError(CallError, TypeError):
    """An argument or a result cannot be turned into bytes, or bytes not into an object."""


class UnknownFunction(CallError, AttributeError):
    """The callee cannot import the function that was named."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class RemoteError(CallError):
    """A remote function raised an exception whose own type cannot be rebuilt here.

    Attributes:
        type_name: Qualified name of the original exception type.
    """

    type_name: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class WorkerLost(WeftError, ConnectionError, RuntimeError):
    """A worker died or can no longer be reached.

    Attributes:
        worker: Name of the lost worker.
        since: When it was noticed, in seconds since the epoch.
        cause: What was noticed, for instance ``"end of file"``.
    """

    worker: str = ""
    since: float = 0.0
    cause: str = ""


class OwnerLost(WorkerLost):
    """The worker that owned a referenced value is lost, and the value with it."""


class ReferenceGone(WeftError, RuntimeError):
    """A reference was used after the value behind it had been released."""


class ProtocolError(WeftError, RuntimeError):
    """A peer sent bytes that do not follow the protocol; its connection is closed."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class TlsError(ProtocolError, ConnectionError):
    """The TLS handshake failed: one side does not speak TLS, or does not trust the other.

    Attributes:
        peer: Address of the other side, as ``host:port``, where it is known.
        reason: What went wrong, without the advice of the message.
    """

    peer: str = ""
    reason: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class AutogradError(WeftError, RuntimeError):
    """A distributed backward pass cannot be run, or failed on some worker.

    Attributes:
        worker: Name of the worker where it failed, where it is known.
        operation: What failed there.
    """

    worker: str = ""
    operation: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BackwardLost(AutogradError, WorkerLost):
    """A worker was lost during a backward pass, which has ended on all others.

    It has the fields of both its classes; ``worker`` is the name of the lost worker.
    """


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BackwardTimeout(AutogradError, TimeoutError):
    """A backward pass was not over in time, and has ended.

    Attributes:
        missing: Names of the workers that the pass still waited for; ``worker`` is the first.
    """

    missing: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class OptimizerError(WeftError, RuntimeError):
    """A distributed optimizer failed on some worker; its cause is the error of that worker.

    Attributes:
        worker: Name of the first worker where it failed.
        others: Names of the other workers where it failed.
    """

    worker: str = ""
    others: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class ReduceError(WeftError, RuntimeError):
    """A reducer failed, after all calls of the map succeeded; its cause is the reducer's exception.

    Attributes:
        reducer: Name of the reducer.
        results: How many results it was given.
    """

    reducer: str = ""
    results: int = 0


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PipelineError(WeftError, RuntimeError):
    """A step of a pipeline failed in some stage; its cause is the error there.

    Attributes:
        stage: Number of the stage, or -1 where no stage is at fault.
        worker: Name of the worker that runs it.
        microbatch: Number of the micro-batch, or -1.
    """

    stage: int = -1
    worker: str = ""
    microbatch: int = -1


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class CheckpointError(WeftError, RuntimeError):
    """A snapshot could not be saved or restored.

    Attributes:
        directory: Where the snapshots are.
        step: Which of them, by the number of steps; None where that is not known.
        worker: Name of the worker where it failed, where it is known.
    """

    directory: str = ""
    step: int | None = None
    worker: str = ""


class SnapshotNotFound(CheckpointError, FileNotFoundError):
    """There is no such snapshot, or a worker cannot access a file of it."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class SnapshotCorrupt(CheckpointError):
    """A file of a snapshot is not as it was written.

    Attributes:
        file: The file.
        alternatives: The steps of the other snapshots in the directory, the last one first.
    """

    file: str = ""
    alternatives: tuple[int, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BrokenChain(CheckpointError):
    """An increment does not follow the snapshot that it is to be, or was, an increment of.

    Attributes:
        snapshot: Path of the increment; empty if it was to be saved.
        base: Path of the snapshot before it.
    """

    snapshot: str = ""
    base: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class StateMismatch(CheckpointError, ValueError):
    """A snapshot does not match the state that it was to be restored into.

    Attributes:
        missing: Entries of the state that the snapshot lacks.
        unexpected: Entries of the snapshot that the state lacks.
        differing: Entries of both that differ, and how.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


class ObserveError(WeftError, RuntimeError):
    """The workers of a group cannot be observed."""


class GroupNotFound(ObserveError, LookupError):
    """There is no group of that name on this host, or several could be meant."""


class ObserverRefused(ObserveError, PermissionError):
    """The workers of a group do not take the secret of this observer."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class ShutdownError(WeftError, RuntimeError):
    """A graceful shutdown failed; the worker is shut down nevertheless.

    Attributes:
        missing: Names of the workers that were lost on the way, or waited for in vain.
    """

    missing: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class LaunchError(WeftError, RuntimeError):
    """Worker processes could not be started, or one of them died.

    Attributes:
        worker: Name of the worker concerned, where one is.
        exit_code: Its exit status, negative for a signal; None where it never started.
    """

    worker: str = ""
    exit_code: int | None = None


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class HostError(LaunchError, ConnectionError):
    """A host cannot be reached, cannot start workers, or was lost with its workers.

    Attributes:
        host: Name of the host.
    """

    host: str = ""


def _rebuild_with_fields(
    error_type: type[WeftError], message: str, fields: dict[str, object]
) -> WeftError:
    if not (isinstance(error_type, type) and issubclass(error_type, WeftError)):
        raise ProtocolError(f"a message makes an error of {error_type!r}")
    return error_type(message, **fields)
