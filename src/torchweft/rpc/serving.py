"""Serves calls from other workers: runs the functions, and answers or keeps what they return."""

from __future__ import annotations

import contextlib
import math
import time
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple, NoReturn

import torch

from torchweft import knobs
from torchweft.arguments import did_you_mean, kind_of
from torchweft.autograd.contexts import enter, set_current_id
from torchweft.engine.codec.exceptions import pack_error, unpack_error
from torchweft.engine.codec.functions import describe, locate, resolve
from torchweft.engine.codec.reading import TRUSTING
from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.codec.tensors import shared_ranges
from torchweft.engine.codec.values import no_home
from torchweft.engine.protocol import calls
from torchweft.engine.protocol.calls import SLOW_S, AnsweredCall, ServedCall
from torchweft.engine.protocol.observing import call_key, making_key, reference_key
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.messages import (
    NAMED,
    NO_CREATION,
    NO_GRAD,
    TABLES,
    ValueHead,
    decode_call,
    split_names,
)
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import OwnedValue
from torchweft.engine.worker.tensor_messages import LocalMessage, TensorMessage
from torchweft.errors import (
    ArgumentTypeError,
    AutogradError,
    NotAllowed,
    ProtocolError,
    SerializationError,
    UnknownFunction,
)
from torchweft.ids import ReferenceId
from torchweft.native import native
from torchweft.rpc.worker import Worker, current_worker

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute by which a function is known that ``async_execution`` has marked."""


class WhenReady(NamedTuple):
    """The result of a function whose work begins when a value of this worker is ready.

    No thread waits for the value.
    """

    owned: OwnedValue
    then: Callable[[Any], Any]
    kept: object = None
    given: Sequence[Any] = ()
    """The values of the call that ``then`` uses, perhaps on another thread."""


class Call(AnsweredCall):
    """A served call; called with its outcome, it replies or makes a value of this worker."""

    __slots__ = ("awaited", "reference")

    peer: Peer
    worker: Worker
    owned: OwnedValue | None
    reference: ReferenceId
    awaited: OwnedValue
    """The value for which the call waits, or has waited; unset if it never has."""

    def starts(
        self, worker: Worker, name: bytes, context_id: int, remaining_s: float, now_s: float
    ) -> bool:
        """Decides whether to run a usual call, for the native twin; see ``begins``."""
        self.worker, self.owned = worker, None
        self.frame, self.function, self.context_id = None, name, context_id
        return self.begins(NO_CREATION, remaining_s, now_s)

    def answer(self, frame: bytearray) -> None:
        """Ends the call with the frame of its answer."""
        if not (self.was_cancelled or self.has_ended):
            self.worker.send_reply(self.peer, self.number, frame)
        self.end()

    def failed_late(self) -> None:
        """Logs the error being handled, which came after the call had ended."""
        log_exception("a call of worker %r failed after it had ended", self.peer.name)

    def not_delivered(self, failure: BaseException) -> SerializationError:
        """Logs that the outcome could not be delivered; returns the error to deliver instead."""
        log_exception("the result of a call of worker %r could not be sent", self.peer.name)
        return calls.not_sendable(self.worker.agent.info.name, failure)

    def keep(self, result: Any, error: BaseException | None) -> None:
        """Resolves the value ``owned`` with the outcome."""
        owned = self.owned
        assert owned is not None
        if error is not None:
            self.worker.note_failure(self.peer, error)
            # As its users will get it: the original's traceback would keep its frames' objects.
            is_plain = self.worker.reader.is_strict
            packed = pack_error(error, self.worker.agent.info.name, is_plain=is_plain)
            error = self.worker.decoder.as_raised_here(unpack_error(packed))
            guard = owned.guard = self.worker.unseen.guard_value(error, self.peer)
            if guard is not None and owned.was_asked_for:
                guard.was_seen = True
        owned.resolve(result, error)

    def create(self, creation: int) -> OwnedValue | None:
        """Returns the value of this worker that the outcome becomes, or None."""
        worker = self.worker
        self.reference = ReferenceId(self.peer.id, worker.agent.me.id, creation)
        return worker.references.created(self.reference)

    def is_referred_to(self) -> bool:
        """Whether any worker holds a reference to the value that the call makes."""
        return self.worker.references.is_owned(self.reference)


def key_of(call: ServedCall) -> str:
    """Returns the key of a served call for observers."""
    if call.number or not isinstance(call, Call):
        return call_key(call.peer.name, call.number)
    reference = getattr(call, "reference", None)
    return "" if reference is None else making_key(reference_key(reference))


def settle(
    worker: Worker, context_id: int, function: Callable[..., Any], result: Any, call: Call
) -> None:
    """Finishes a call with its function's result, now or when the result is ready.

    Never raises: an error from the computed attributes of a callable becomes the outcome.
    """
    try:
        if hasattr(function, ASYNC_MARK):
            _finish_with_future(worker, function, result, call)
        elif isinstance(result, CoroutineType):
            cancel = worker.coroutines.run(result, context_id, call)
            if cancel is not None:
                call.on_cancel(lambda _: cancel())
        elif type(result) is WhenReady:
            _finish_when_ready(worker, context_id, result, call)
        elif result is TAKEN:
            pass  # Its queue, or its stream, ends the call.
        else:
            call(result, None)
    except BaseException as error:
        call.fail(error)


def _finish_with_future(
    worker: Worker, function: Callable[..., Any], result: Any, call: Call
) -> None:
    if not isinstance(result, torch._C.Future):
        call(None, calls.no_future(describe(function), result))
        return

    def pass_on(done: Any) -> None:
        try:
            value = done.wait()
        except BaseException as error:
            call(None, error)
        else:
            call(value, None)

    result.then(pass_on)


def _finish_when_ready(worker: Worker, context_id: int, waiting: WhenReady, call: Call) -> None:
    mark: device_streams.Mark | None = None

    def ready(owned: OwnedValue) -> None:
        # As a task: the thread that made the value has other work to do.
        worker.agent.reactor.submit_task(go_on, owned)

    def go_on(owned: OwnedValue, _: object) -> None:
        device_streams.use(mark, *waiting.given)
        if worker.carrier is None:
            proceed(worker, context_id, waiting, call, owned)
        else:
            worker.carrier.around(call, partial(proceed, worker, context_id, waiting, call, owned))

    def give_up(owned: OwnedValue, _: object) -> None:
        if owned.forget(ready):
            call.give_up()

    owned = waiting.owned
    if owned.is_ready:
        proceed(worker, context_id, waiting, call, owned)
    else:
        call.awaited = owned
        mark = device_streams.mark()
        owned.when_ready(ready)
        # As a task: dropping the callback may finalize objects of the program.
        call.on_cancel(lambda _: worker.agent.reactor.submit_task(give_up, owned))


def proceed(
    worker: Worker, context_id: int, waiting: WhenReady, call: Call, owned: OwnedValue
) -> None:
    """Continues a call whose value is ready."""
    if not call.goes_on(owned.error, time.monotonic()):
        return
    if owned.mark is not None:
        device_streams.use(owned.mark, owned.value)
    before = current_call.set(call)
    worker.serving[get_ident()] = call
    try:
        with enter(context_id):
            function, result = waiting.then(owned.value)
    except BaseException as error:
        call(None, error)
    else:
        settle(worker, context_id, function, result, call)
    finally:
        worker.serving.pop(get_ident(), None)
        current_call.reset(before)


_MOST_USUAL = 4096


def install(worker: Worker) -> None:
    """Makes ``worker`` serve calls."""
    serve, refuse = partial(_handle, worker, _serve), partial(_handle, worker, _refuse)
    worker.agent.receiver.on_calls(serve, refuse, Call)
    if native is not None and worker.reader is TRUSTING:
        worker.agent.members.on_joined(partial(_learn_to_serve, worker))


def _learn_to_serve(worker: Worker, peer: Peer) -> None:
    """Gives the native twin what serving calls of a worker takes, in its order."""
    if peer.is_self or peer.device_maps.moves_host_of_answers:
        return
    most = knobs.TENSOR_LIMIT.get()
    ends = partial(settle, worker, 0), partial(_note_slow, worker)
    encodes = peer.receiver, most, no_home
    decodes = most, worker.reader.resolve_value, worker.decoder.take_home
    peer.server = worker, worker.usual, current_call, worker.serving, *ends, *encodes, *decodes


def _note_usual(worker: Worker, name: bytes, function: Any) -> None:
    """Lets the native twin serve the calls of a function from now on."""
    if native is None or worker.watchers or len(worker.usual) >= _MOST_USUAL:
        return
    if not hasattr(function, ASYNC_MARK):
        worker.usual[name] = (*locate(name), function)
        if worker.watchers:  # Race: they have come just now.
            worker.usual.clear()


def _note_slow(worker: Worker, name: bytes) -> None:
    worker.usual.pop(name, None)
    worker.slow.note(name, was_slow=False)


def _handle(
    worker: Worker, handle: Callable[[Worker, Peer, Call], None], peer: Peer, call: Call
) -> None:
    """Serves or refuses a call, and tells the watchers of it."""
    call.worker, call.owned = worker, None
    try:
        if worker.watchers:
            worker.note_serving(call)
        if worker.carrier is None:
            handle(worker, peer, call)
        else:
            worker.carrier.around(call, partial(handle, worker, peer, call))
    except ProtocolError as error:  # Errors of the function are its answer.
        worker.agent.receiver.turn_away(peer, error)
    except BaseException as error:  # Before the function ran, or after it answered.
        call.fail(error)


def _serve(worker: Worker, peer: Peer, call: Call) -> None:
    """Runs one call; its errors become its answer."""
    frame = call.frame
    assert frame is not None
    is_usual = peer.server is not None and not shared_ranges
    if is_usual and native.serve_call(peer.server, call, frame):
        link = peer.link
        if link is not None:
            link.expects_usual = link.serves
        return
    call.frame = None
    flags = frame.flags
    control: Any = frame.control
    is_local = type(control) is LocalMessage
    remaining_s, creation, name, _, head = control.head if is_local else decode_call(control)
    message = worker.tensor_messages.read(frame) if flags & TABLES else None
    del frame
    call.function, call.context_id = name, (context_id := head[0])
    began_s = time.monotonic()
    if not call.begins(creation, remaining_s, began_s):
        _give_back(worker, peer, head, message)
        return
    if message is not None and not _fetch(worker, peer, call, head, message):
        return
    was_slow = not name or name in worker.slow
    if was_slow:
        worker.agent.reactor.arm_all()
    entered_id = 0
    if context_id and context_id != NO_GRAD:
        entered_id = context_id
        set_current_id(entered_id)
    current_call.set(call)  # Never reset: each task has a Python context of its own.
    worker.serving[get_ident()] = call
    function: Any = None
    try:
        if is_local:
            values = worker.decoder.open_own(control, context_id)
        else:
            values = worker.decoder.open(peer, control, head, message)
        del control, message  # Free them with the arguments.
        if type(values) is not tuple:
            # A tensor of few bytes may have any number of rows, which would be taken apart.
            raise ArgumentTypeError(f"the arguments of a call are {kind_of(values)}, not a tuple")
        kwargs: dict[str, Any] = {}
        if flags & NAMED:
            values, kwargs = split_names(values)
        if name:
            function = resolve(name) if is_local else worker.reader.resolve(name)
        else:
            function, values = _by_value(worker, call, values)
        result = function(*values, **kwargs)
        del values, kwargs
    except BaseException as error:
        call(None, error)
    else:
        settle(worker, entered_id, function, result, call)
    finally:
        worker.serving.pop(get_ident(), None)
        is_slow = time.monotonic() - began_s > SLOW_S
        if was_slow != is_slow:
            worker.slow.note(name, was_slow=was_slow)
            worker.usual.pop(name, None)
        elif name and function is not None and not was_slow and name not in worker.usual:
            _note_usual(worker, name, function)


def _by_value(
    worker: Worker, call: Call, values: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function of a call that has no name for it, and the arguments."""
    if not values:
        raise ProtocolError("a call has neither a name nor a function")
    function = values[0]
    if not call.peer.is_self:
        worker.reader.check_called(function)
    call.function = function
    return function, values[1:]


def _fetch(worker: Worker, peer: Peer, call: Call, head: ValueHead, message: TensorMessage) -> bool:
    """Fetches the tensors of a call; if that fails, answers the call and returns False."""
    try:
        worker.tensor_messages.fetch(peer, message)
    except Exception as error:
        worker.decoder.refuse(peer, head)
        call(None, error)
        return False
    return True


def _give_back(worker: Worker, peer: Peer, head: ValueHead, message: TensorMessage | None) -> None:
    """Releases the tensors, references and graph of a call that will not run."""
    if message is not None:
        worker.tensor_messages.discard(peer, message)
    worker.decoder.refuse(peer, head)


def _refuse(worker: Worker, peer: Peer, call: Call) -> None:
    """Refuses a call because too many calls wait; gives its references back."""
    frame, call.frame = call.frame, None
    assert frame is not None
    control: Any = frame.control
    message = worker.tensor_messages.read(frame) if frame.flags & TABLES else None
    is_local = isinstance(control, LocalMessage)
    remaining_s, creation, *_, head = control.head if is_local else decode_call(control)
    _give_back(worker, peer, head, message)
    call.context_id = head[0]
    error = calls.too_many_waiting(worker.agent.info.name, peer.name)
    call.refuse(creation, remaining_s, time.monotonic(), error)


# Functions that other workers call by name: see torchweft.rpc.calls. The parts of a reference of
# this worker come first. ``kept`` is the reference itself, for calls whose caller may not keep it
# meanwhile.


@remotely_callable
def fetch(creator: int, owner: int, number: int, kept: object) -> WhenReady:
    """Returns the value behind a reference."""
    return WhenReady(owned((creator, owner, number)), lambda value: (fetch, value), kept)


@remotely_callable
def call_method(
    creator: int, owner: int, number: int, kept: object, name: str, /, *args: Any, **kwargs: Any
) -> WhenReady:
    """Calls a method of the value behind a reference."""

    def call(value: Any) -> tuple[Callable[..., Any], Any]:
        method = method_of(value, name)
        served = current_call.get()
        if served is not None:
            served.function = method
        return method, method(*args, **kwargs)

    return WhenReady(owned((creator, owner, number)), call, kept, (args, kwargs))


def method_of(value: Any, name: str) -> Any:
    """Returns a method of a value of this worker, for the call that this thread serves.

    Raises:
        NotAllowed: The caller is another worker, which may not call the method.
        UnknownFunction: The value has no method of that name.
    """
    served = current_call.get()
    is_own = served is None or served.peer.is_self
    try:
        return getattr(value, name) if is_own else current_worker().reader.method_of(value, name)
    except AttributeError as error:
        names = dir(value)
        if name in names:
            raise  # The attribute exists: the program's code behind it raised the error.
        kind = type(value).__name__
        text = f"{error}{did_you_mean(name, names)}"
        raise UnknownFunction(text, call=f"{kind}.{name}") from None


@remotely_callable
def backward_from(
    creator: int, owner: int, number: int, kept: object, context_id: int, retain_graph: bool
) -> WhenReady:
    """Runs a backward pass from the value behind a reference."""

    def run(value: Any) -> tuple[Callable[..., Any], None]:
        run_backward(current_worker(), value, context_id, retain_graph)
        return backward_from, None

    return WhenReady(owned((creator, owner, number)), run, kept)


def run_backward(worker: Worker, value: Any, context_id: int, retain_graph: bool) -> None:
    """Runs a backward pass from a value of this worker, in a context or (-1) locally."""
    if not isinstance(value, torch.Tensor):
        raise AutogradError(
            "RRef should contain a tensor for .backward(); this one refers to a "
            f"{type(value).__name__}"
        )
    if context_id < 0:
        torch.autograd.backward([value], retain_graph=retain_graph)
    else:
        worker.engine.backward(context_id, [value], retain_graph=retain_graph)


def owned(reference: tuple[int, int, int]) -> OwnedValue:
    """Returns the value of this worker behind a reference, which the caller keeps."""
    worker = current_worker()
    target = reference_in(reference)
    if target.owner != worker.agent.me.id:
        raise ProtocolError(f"{target} was asked of worker {worker.agent.info.name!r}")
    return worker.references.value_of(target)


# The call that a function serves: its time limit, and the checks that a strict worker makes.
#
# The caller of a served function waits for a limited time. Nested calls have no more time than is
# left, and end when the caller gives up.

TAKEN = object()
"""Returned to the server of calls in place of a result: a batch or a stream answers the call."""


def remaining_time() -> float:
    """Returns how many seconds the caller of the running function still waits for it.

    Infinity if the caller waits without a limit, in a function that ``remote`` has called, and
    outside of served calls. Threads that a function starts do not inherit its call; asyncio tasks
    do, and so do callbacks of the futures of its calls.
    """
    call = serving()
    return math.inf if call is None else call.remaining_s(time.monotonic())


def is_cancelled() -> bool:
    """Returns whether the running function's caller no longer waits, so that it may end.

    True if the caller has cancelled the call, has no time left, or is lost. After ``remote``: if
    the caller is lost and no other reference to the value exists. False outside of served calls.
    """
    call = serving()
    return call is not None and call.notice_unwanted(time.monotonic())


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Separates calls within the block from the call that the running function serves.

    They have their own time limits, and go on when the caller has given up. Use it for cleanup
    that must run even then, or for work that goes on after the function has returned.
    """
    token = current_call.set(None)
    try:
        yield
    finally:
        current_call.reset(token)


def serving() -> ServedCall | None:
    """Returns the call that the running code serves; None without a call or after its answer."""
    call = current_call.get()
    return call if call is not None and call.is_current else None


# Checks that Weft's own entry points make before they act for other workers on a strict worker.
# Other workers call an entry point with any plain values. So it checks types first, calls only
# registered functions, and touches only objects that were made for it. In a call of this worker to
# itself, and on a worker that is not strict, nothing is refused here.


def strict_caller() -> Peer | None:
    """Returns the caller of the served call, if it is another worker and this worker is strict."""
    served = current_call.get()
    if served is None or served.peer.is_self or not current_worker().reader.is_strict:
        return None
    caller: Peer = served.peer
    return caller


def serves_another_strictly() -> bool:
    """Returns whether this thread runs a call of another worker, on a strict worker."""
    return strict_caller() is not None


def caller() -> Peer:
    """Returns the worker whose call is served; this worker where no call is."""
    served = current_call.get()
    if served is None:
        return current().me
    found: Peer = served.peer
    return found


def check_caller(names: Sequence[str], what: str) -> None:
    """Checks that a call comes from one of the workers that may make it.

    Args:
        names: Names of these workers.
        what: What they alone may do, after "may not".

    Raises:
        NotAllowed: Another worker calls; names it, and those that may.
    """
    found, me = caller().name, current().me.name
    if found not in names:
        raise NotAllowed(
            f"worker {found!r} may not {what} on worker {me!r}; that is for "
            f"{', '.join(map(repr, names))} alone",
            worker=me,
            refused=what,
        )


def check_called(function: Any) -> None:
    """Raises NotAllowed if a function in the arguments of a call may not be called."""
    if serves_another_strictly():
        current_worker().reader.check_called(function)


def check_types(**arguments: tuple[Any, type | tuple[type, ...]]) -> None:
    """Raises unless the arguments of an entry point have their types, or subclasses of them.

    Args:
        arguments: The value and the type of each argument, by its name.

    Raises:
        ArgumentTypeError: Another worker has sent an argument of another type.
    """
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(each.__name__ for each in kinds)
            raise ArgumentTypeError(
                f"{name} of a call of Weft's own is a {type(value).__name__}, not a {expected}"
            )


def reference_in(address: Any) -> ReferenceId:
    """Returns the reference whose number another worker has sent.

    Raises:
        ArgumentTypeError: Not three integers. Unpacking a tensor would take it apart row by row.
    """
    if type(address) in (tuple, ReferenceId) and [type(each) for each in address] == [int] * 3:
        return ReferenceId(*address)
    raise ArgumentTypeError(f"a {type(address).__name__} was sent in place of a reference's number")


def refuse(what: str, why: str) -> NoReturn:
    """Raises NotAllowed for an action that a strict worker refuses to other workers."""
    name = current().info.name
    raise NotAllowed(
        f"worker {name!r} is strict and does not {what}: {why}", worker=name, refused=what
    )
