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
    │   ├── RendezvousTimeout (TimeoutError)   somebody never came; says who
    │   └── DuplicateName                      two workers took the same name
    ├── UnknownWorker (RuntimeError, ValueError)   no worker has that name or rank
    ├── MethodNotFound (RuntimeError, AttributeError)   the referenced value has no such method
    ├── CallError (RuntimeError)               one call failed; others are not affected
    │   ├── CallTimeout (TimeoutError)         no answer within the call's timeout
    │   ├── CallCancelled                      the caller gave it up
    │   ├── CallRefused                        the callee would not start it
    │   │   ├── QueueFull                      too many calls of this worker wait there already
    │   │   └── NotAllowed                     a message names what its receiver does not allow
    │   ├── SerializationError (TypeError)     an argument or result cannot travel
    │   ├── UnknownFunction (AttributeError)   the callee has no function of that name
    │   ├── InjectedFault                      a test had the message fail
    │   └── RemoteError                        the callee raised a type that cannot be rebuilt here
    ├── WorkerLost (ConnectionError, RuntimeError)   a worker died or cannot be reached
    │   └── OwnerLost                          the lost worker owned a referenced value
    ├── ReferenceGone (RuntimeError)           the referenced value was already released
    ├── ProtocolError (RuntimeError)           a peer sent what no Weft of this version sends
    │   └── TlsError (ConnectionError)         no secure connection with whoever is there; says why
    ├── AutogradError (RuntimeError)           a distributed backward pass cannot be run
    ├── OptimizerError (RuntimeError)          an optimizer failed on some worker; says which
    ├── ReduceError (RuntimeError)             the results of a map could not be put together
    ├── CheckpointError (RuntimeError)         a snapshot could not be saved or restored
    │   ├── SnapshotNotFound (FileNotFoundError)   there is none, or a worker lacks a file of it
    │   ├── SnapshotCorrupt                    a file is not as it was written; names the others
    │   └── StateMismatch (ValueError)         it is of another state; says what differs
    ├── ShutdownError (RuntimeError)           a graceful shutdown went wrong; says who and why
    └── LaunchError (RuntimeError)             worker processes could not be started, or one died

Each is also a subclass of the built-in exception that users of ``torch.distributed.rpc``
catch. What a program may want to act on is a field, not only text.
"""

from __future__ import annotations


class WeftError(Exception):
    """The root of every error that Weft itself raises."""


class ConfigurationError(WeftError, ValueError, RuntimeError):
    """An argument or an option has a value that cannot work."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of a type that cannot work."""


class NotOwner(ConfigurationError, RuntimeError):
    """Something was asked of a reference that only the owner of its value can do."""


class NotSupported(WeftError, NotImplementedError):
    """Something of PyTorch's RPC was asked for that has no meaning in Weft."""


class NotInitialized(WeftError, RuntimeError):
    """A call needs a worker that has joined its group, and this process has none."""


class AlreadyInitialized(WeftError, RuntimeError):
    """This process is a worker already."""


class RendezvousError(WeftError, RuntimeError):
    """The workers of a group could not agree on who they are."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Some workers did not come in time.

    Attributes:
        missing: Ranks that never arrived.
        elapsed_s: How long this worker waited, in seconds.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = (), elapsed_s: float = 0.0) -> None:
        super().__init__(message)
        self.missing = missing
        self.elapsed_s = elapsed_s

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.missing, self.elapsed_s))


class DuplicateName(RendezvousError):
    """Two workers of one group asked for the same name."""


class UnknownWorker(WeftError, RuntimeError, ValueError):
    """No worker of the group has that name, rank or description."""


class MethodNotFound(WeftError, RuntimeError, AttributeError):
    """The value behind a reference has no such method; raised by the caller, before any call."""


class CallError(WeftError, RuntimeError):
    """One remote call failed.

    Attributes:
        worker: Name of the worker that was called, where it is known.
        call: Readable name of the function that was called, where it is known.
        elapsed_s: Seconds between the start of the call and the failure.
    """

    def __init__(
        self, message: str, *, worker: str = "", call: str = "", elapsed_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.call = call
        self.elapsed_s = elapsed_s

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (
                type(self),
                str(self),
                {"worker": self.worker, "call": self.call, "elapsed_s": self.elapsed_s},
            ),
        )


class CallTimeout(CallError, TimeoutError):
    """A call had no answer within its timeout; the callee may still be running it."""


class CallCancelled(CallError):
    """A call was cancelled by its caller."""


class CallRefused(CallError):
    """The callee did not start the call, for instance because it is shutting down."""


class QueueFull(CallRefused):
    """Too many calls of this worker wait at the callee already; this one was not started."""


class NotAllowed(CallRefused):
    """A message names what its receiver does not allow: a function, a class, or any pickle at all.

    Raised to the caller, by the callee for what is called and its arguments, or by the caller
    itself for the result. Nothing of what was refused has been imported or run.

    Attributes:
        refused: What was refused.
    """

    def __init__(self, message: str, *, worker: str = "", refused: str = "") -> None:
        super().__init__(message, worker=worker)
        self.refused = refused

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (type(self), str(self), {"worker": self.worker, "refused": self.refused}),
        )


class SerializationError(CallError, TypeError):
    """An argument or a result cannot be turned into bytes, or bytes not into an object."""


class UnknownFunction(CallError, AttributeError):
    """The callee cannot import the function that was named."""


class InjectedFault(CallError):
    """A message was not sent because a test asked for it to fail."""


class RemoteError(CallError):
    """A remote function raised an exception whose own type cannot be rebuilt here.

    Attributes:
        type_name: Qualified name of the original exception type.
    """

    def __init__(self, message: str, *, type_name: str = "", worker: str = "") -> None:
        super().__init__(message, worker=worker)
        self.type_name = type_name

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (type(self), str(self), {"type_name": self.type_name, "worker": self.worker}),
        )


class WorkerLost(WeftError, ConnectionError, RuntimeError):
    """A worker died or can no longer be reached.

    Attributes:
        worker: Name of the lost worker.
        since: When it was noticed, in seconds since the epoch.
        cause: What was noticed, for instance ``"end of file"``.
    """

    def __init__(
        self, message: str, *, worker: str = "", since: float = 0.0, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.since = since
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (
                type(self),
                str(self),
                {"worker": self.worker, "since": self.since, "cause": self.cause},
            ),
        )


class OwnerLost(WorkerLost):
    """The worker that owned a referenced value is lost, and the value with it."""


class ReferenceGone(WeftError, RuntimeError):
    """A reference was used after the value behind it had been released."""


class ProtocolError(WeftError, RuntimeError):
    """A peer sent bytes that do not follow the protocol; its connection is closed."""


class TlsError(ProtocolError, ConnectionError):
    """The TLS handshake failed: one side does not speak TLS, or does not trust the other.

    Attributes:
        peer: Address of the other side, as ``host:port``, where it is known.
        reason: What went wrong, without the advice of the message.
    """

    def __init__(self, message: str, *, peer: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.peer = peer
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (type(self), str(self), {"peer": self.peer, "reason": self.reason}),
        )


class AutogradError(WeftError, RuntimeError):
    """A distributed backward pass cannot be run, or failed on some worker.

    Attributes:
        worker: Name of the worker where it failed, where it is known.
        operation: What failed there.
    """

    def __init__(self, message: str, *, worker: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.operation = operation

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (type(self), str(self), {"worker": self.worker, "operation": self.operation}),
        )


class OptimizerError(WeftError, RuntimeError):
    """A distributed optimizer failed on some worker; its cause is the error of that worker.

    Attributes:
        worker: Name of the first worker where it failed.
        others: Names of the other workers where it failed.
    """

    def __init__(self, message: str, *, worker: str = "", others: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.worker = worker
        self.others = others

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (type(self), str(self), {"worker": self.worker, "others": self.others}),
        )


class ReduceError(WeftError, RuntimeError):
    """A reducer failed; its cause is what it raised, and the calls of the map went well.

    Attributes:
        reducer: Name of the reducer.
        results: How many results it was given.
    """

    def __init__(self, message: str, *, reducer: str = "", results: int = 0) -> None:
        super().__init__(message)
        self.reducer = reducer
        self.results = results

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_with_fields,
            (type(self), str(self), {"reducer": self.reducer, "results": self.results}),
        )


class CheckpointError(WeftError, RuntimeError):
    """A snapshot could not be saved or restored.

    Attributes:
        directory: Where the snapshots are.
        step: Which of them, by the number of steps; None where that is not known.
        worker: Name of the worker where it failed, where it is known.
    """

    def __init__(
        self, message: str, *, directory: str = "", step: int | None = None, worker: str = ""
    ) -> None:
        super().__init__(message)
        self.directory = directory
        self.step = step
        self.worker = worker

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_with_fields, (type(self), str(self), dict(vars(self)))


class SnapshotNotFound(CheckpointError, FileNotFoundError):
    """There is no such snapshot, or a worker cannot get at a file of it."""


class SnapshotCorrupt(CheckpointError):
    """A file of a snapshot is not as it was written.

    Attributes:
        file: The file.
        alternatives: The steps of the other snapshots in the directory, the last one first.
    """

    def __init__(
        self,
        message: str,
        *,
        directory: str = "",
        step: int | None = None,
        worker: str = "",
        file: str = "",
        alternatives: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, directory=directory, step=step, worker=worker)
        self.file = file
        self.alternatives = alternatives


class StateMismatch(CheckpointError, ValueError):
    """A snapshot is of another state than the one that it was to be restored into.

    Attributes:
        missing: What the state has and the snapshot has not.
        unexpected: What the snapshot has and the state has not.
        differing: What both have, and how it differs.
    """

    def __init__(
        self,
        message: str,
        *,
        directory: str = "",
        step: int | None = None,
        worker: str = "",
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        differing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, directory=directory, step=step, worker=worker)
        self.missing = missing
        self.unexpected = unexpected
        self.differing = differing


class ShutdownError(WeftError, RuntimeError):
    """A graceful shutdown did not end as it should; the worker is shut down all the same.

    Attributes:
        missing: Names of the workers that were lost on the way, or waited for in vain.
    """

    def __init__(self, message: str, *, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_with_fields, (type(self), str(self), {"missing": self.missing}))


class LaunchError(WeftError, RuntimeError):
    """Worker processes could not be started, or one of them died.

    Attributes:
        worker: Name of the worker concerned, where one is.
        exit_code: Its exit status, negative for a signal; None where it never started.
    """

    def __init__(self, message: str, *, worker: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code


def _rebuild_with_fields(
    error_type: type[WeftError], message: str, fields: dict[str, object]
) -> WeftError:
    if not (isinstance(error_type, type) and issubclass(error_type, WeftError)):
        raise ProtocolError(f"a message makes an error of {error_type!r}")
    return error_type(message, **fields)
