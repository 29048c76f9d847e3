"""Functions for workers in the tests of strangers: the victim, the others, and a bad member."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.contract.processes import attacks, functions
from tests.contract.processes.functions import wait_until
from tests.free_encoder import Keys, Made
from tests.processes import hostility, unpickling
from tests.processes.attacks_internals import call_named, send_freely
from tests.processes.attacks_internals import send_pickle as send_pickled
from torchweft import autograd, rpc
from torchweft.engine.codec import values as tags
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Handshake
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.nn import RemoteModule, owner
from torchweft.optim import local
from torchweft.optim.local import GroupPart
from torchweft.rpc.worker import current_worker

LIMIT_S = 10.0
CALL_LIMIT_S = 5.0
GHOST = 77
"""The id of a worker that does not exist."""


class State(NamedTuple):
    """The observed state of a worker."""

    unpickled: list[str]
    threads: int
    descriptors: int
    largest_bytes: int
    members: list[str]


def join(
    name: str, rank: int, method: str, environment: dict[str, str], options: dict[str, Any]
) -> None:
    os.environ.update(environment)
    told = {"init_method": method, "init_timeout": LIMIT_S, "rpc_timeout": LIMIT_S, **options}
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.RpcBackendOptions(**told))


def tcp_address() -> str:
    (address,) = [
        each for each in current().me.registration.addresses if not each.startswith("unix")
    ]
    return address


def session_with(name: str) -> str:
    terms = current().find(name).connecting.session
    assert terms is not None
    return terms.name


def state() -> State:
    return State(
        unpickling.seen(),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        unpickling.largest_bytes(),
        sorted(info.name for info in rpc.get_worker_infos()),
    )


def threads() -> int:
    return threading.active_count()


def dial_at(address: str, worker: int) -> str:
    """Makes this worker dial ``worker`` at an address, once; returns the outcome."""
    ghost = Peer(Registration("ghost", worker, (address,)), main_by_name=False, is_self=False)
    try:
        current()._connector._introduce_once(ghost, time.monotonic() + LIMIT_S)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "introduced"


# A member that calls continuously


class Calls:
    """Calls another worker, one call after the other."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._count = 0
        self._slowest_s = 0.0
        self._error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                start_s = time.monotonic()
                assert rpc.rpc_sync(self._to, functions.name_here, timeout=CALL_LIMIT_S) == self._to
                self._slowest_s = max(self._slowest_s, time.monotonic() - start_s)
                self._count += 1
                time.sleep(0.002)  # Other tests need the machine at the same time.
        except Exception as error:
            self._error = error

    def go_on(self) -> float:
        """Waits for calls that begin now; returns how long the slowest since the last wait took."""
        least = self._count + 2
        wait_until(
            lambda: self._count >= least or self._error is not None, lambda: "no call ends", LIMIT_S
        )
        if self._error is not None:
            raise self._error
        slowest_s, self._slowest_s = self._slowest_s, 0.0
        return slowest_s


_calls: dict[str, Calls] = {}


def begin_calls(to: str) -> None:
    _calls[to] = Calls(to)


def calls_go_on(to: str) -> float:
    return _calls[to].go_on()


def call_once(to: str) -> str:
    return rpc.rpc_sync(to, functions.name_here, timeout=CALL_LIMIT_S)


# A member that attacks: the outcomes of its calls


def _raised_by(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "its result"


def call_by_name(to: str, path: str) -> str:
    return _raised_by(lambda: call_named(to, b"os:system", (f"touch {path}",), {}))


def send_pickle(to: str, path: str) -> str:
    return _raised_by(lambda: send_pickled(to, attacks.Payload(path)))


class Handle:
    """A value of the victim's program with methods that other workers may not call."""

    def train(self, mode: object) -> object:
        return mode

    state_dict = load_state_dict = apply = parameters = __call__ = train


def make_handle() -> Any:
    return rpc.RRef(Handle())


class _Reduced:
    """Pickles to a call, with a state set afterwards."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


def _all_raise(*calls: Any) -> str:
    """Returns the distinct outcomes of the calls; one name if all are the same."""
    return ", ".join(sorted({_raised_by(call) for call in calls}))


def call_ndarray(to: str, path: str) -> str:
    call = functools.partial(call_named, to, b"numpy:ndarray", ((1,), "O", b"A" * 8))
    return _all_raise(lambda: call({}), lambda: call({"order": None}))


def send_arrays(to: str, path: str) -> str:
    false = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    kind = _Reduced(np.dtype, ("V8", False, True), false)
    begun = np.zeros(0).__reduce_ex__(4)
    array = _Reduced(begun[0], begun[1], (1, (1,), kind, False, b"A" * 8))
    raw = _Reduced(np.ndarray, ((1,), "O", b"A" * 8))
    return _all_raise(*(functools.partial(send_pickled, to, each) for each in (raw, array)))


def compile_module(to: str, path: str) -> str:
    made = RemoteModule(to, attacks.Model).get_module_rref()
    other = rpc.remote(to, attacks.Model)
    flags = {"cpp.enable_floating_point_contract_flag": f'off -wrapper sh,-c,"touch {path}"'}
    return _all_raise(*(lambda it=it: it.rpc_sync().compile(options=flags) for it in (made, other)))


def call_torch(to: str, path: str) -> str:
    names = (
        b"torch.nn.utils._deprecation_utils:lazy_deprecated_import",
        b"torch.nn.attention._fa3:_fa3_import_module",
        b"torch.sparse._triton_ops_meta:update",
        b"torch.sparse._triton_ops_meta:dump",
        b"torch:load",
    )
    return _all_raise(*(lambda name=name: call_named(to, name, ("this",), {}) for name in names))


def break_sparse(to: str, path: str) -> str:
    dense = rpc.remote(to, functions.identity, args=(torch.ones(4, 4),))
    dense.to_here()
    return _all_raise(
        lambda: dense.rpc_sync().to_sparse(),
        lambda: dense.remote().indices().to_here(),
        lambda: dense.rpc_sync().fill_(1.0),
    )


def send_sparse(to: str, path: str) -> str:
    arguments = (torch.tensor([[1 << 40]]), torch.ones(1), (4,), True)
    broken = Made("torchweft.engine.codec.reducers:_sparse_coo", arguments)
    return _raised_by(lambda: send_freely(to, broken))


_ONE_HASH = (1 << 61) - 1
"""Integers hash to their remainder by this number."""


def send_one_hash(to: str, path: str) -> str:
    numbers = [number * _ONE_HASH for number in range(20_000)]
    pairs = [(number, 0) for number in numbers]
    return _all_raise(
        lambda: send_freely(to, Keys(tags.SET, numbers)),
        lambda: send_freely(to, Keys(tags.DICTIONARY, pairs)),
        lambda: send_freely(to, [Keys(tags.FROZENSET, numbers[:5000])] * 9),
    )


def send_nest(to: str, path: str) -> str:
    nest: list[Any] = [0]
    for _ in range(60):
        nest = [nest, nest]
    module = RemoteModule(to, attacks.Model).get_module_rref()
    return _all_raise(
        lambda: rpc.rpc_sync(to, functions.identity, args=(nest,)),
        lambda: rpc.rpc_sync(to, owner.run, args=(*module.id, None, "cuda", None, nest)),
    )


def send_expanded(to: str, path: str) -> str:
    views = [torch.ones(1).expand(1 << 32)] * 2
    weight = torch.nn.Parameter(torch.ones(1))

    def record() -> None:
        computed = (weight * 1.0).expand(1 << 32)
        rpc.rpc_sync(to, functions.identity, args=([computed, computed.view(2, -1)],))

    def record_in_context() -> None:
        with autograd.context():
            record()

    return _all_raise(
        lambda: rpc.rpc_sync(to, functions.identity, args=(views,)), record, record_in_context
    )


def repeat_tensor(to: str, path: str) -> str:
    many = [torch.ones(1000)] * 100_000
    return _raised_by(lambda: rpc.rpc_sync(to, functions.identity, args=(many,)))


def use_entry_points(to: str, path: str) -> str:
    handle = rpc.rpc_sync(to, make_handle)
    return _all_raise(
        lambda: rpc.rpc_sync(to, owner.set_training, (handle, True)),
        lambda: rpc.rpc_sync(to, owner.set_requires_grad, (handle, True)),
        lambda: rpc.rpc_sync(to, owner.convert, (handle, functions.identity, True)),
        lambda: rpc.rpc_sync(to, owner.state, (handle, "")),
        lambda: rpc.rpc_sync(to, owner.parameters, (handle, True)),
        lambda: rpc.rpc_sync(to, owner.load_state, (handle, {})),
        lambda: rpc.rpc_sync(to, owner.apply, (handle, functions.identity)),
    )


def use_foreign_module(to: str, path: str) -> str:
    module = rpc.remote(to, attacks.Model)
    handle = rpc.rpc_sync(to, make_handle)
    return _all_raise(
        lambda: rpc.rpc_sync(to, owner.set_training, (module, True)),
        lambda: rpc.rpc_sync(to, owner.run, (*module.id, None, "cpu", (), torch.tensor([1]))),
        lambda: rpc.rpc_sync(to, owner.run, (*handle.id, None, "cpu", (), 1)),
        lambda: handle.rpc_sync().train(True),
        lambda: handle.rpc_sync()(1),
    )


def fuse(to: str, path: str) -> str:
    parameters = RemoteModule(to, attacks.Model).remote_parameters()[1:]
    parts = [GroupPart(0, {"lr": 0.1}, list(range(len(parameters))), parameters)]
    return _all_raise(
        lambda: rpc.rpc_sync(to, local.place, (None, torch.optim.Adam, (), {"fused": True}, parts)),
        lambda: rpc.rpc_sync(to, local.change, ((0, 0, 0), {0: {"fused": True}})),
        lambda: rpc.rpc_sync(to, local.change, ((0, 0, 0), {0: {"params": [torch.ones(1)]}})),
        lambda: rpc.rpc_sync(to, local.place, (None, torch.optim.SGD, (), {}, parts)),
    )


def send_many_tensors(to: str, path: str) -> str:
    tensor_messages = current_worker().tensor_messages
    before, tensor_messages._tensor_limit = tensor_messages._tensor_limit, 1 << 15
    try:
        sent = [torch.ones(5000) for _ in range(200)]  # Too large for the path of small tensors.
        return _raised_by(lambda: rpc.rpc_sync(to, functions.identity, args=(sent,)))
    finally:
        tensor_messages._tensor_limit = before


_held: list[Any] = []
_gate = threading.Event()


def begin_many_calls(to: str) -> None:
    """Makes more calls than the queue limit; returns when some have been refused."""
    _held[:] = [rpc.rpc_async(to, hold) for _ in range(100)]
    wait_until(lambda: any(call.done() for call in _held), lambda: "none is refused", LIMIT_S)


def end_many_calls() -> list[str]:
    """Waits for all calls to end; returns their distinct outcomes."""
    return sorted({_raised_by(call.wait) for call in _held})


def hold() -> None:
    assert _gate.wait(LIMIT_S)


def open_gate() -> None:
    _gate.set()


# A member that attacks: frames over a connection of its own


def send_frames(to: str, content: bytes, as_worker: str = "") -> tuple[list[str], bool]:
    """Sends ``content`` as a new member, or as one that claims to be ``as_worker``.

    Returns:
        The answer to the greeting, if any, and whether the victim hung up.
    """
    greeting = hostility._greeting(to, "tcp")
    if as_worker:
        other = current().find(as_worker)
        greeting.facts["registration"] = other.registration.as_json()
        greeting = greeting.__class__(other.id, facts=greeting.facts)
    (address,) = [
        each for each in current().find(to).registration.addresses if each.startswith("tcp")
    ]
    said = []
    with addresses.dial(addresses.parse(address), LIMIT_S) as connection:
        handshake = Handshake.dial(connection, current()._connector.key, time.monotonic() + LIMIT_S)
        handshake.send(Kind.HELLO, greeting)
        try:
            welcome = handshake.receive(Kind.WELCOME)
        except OSError:
            return [], True
        said.append(f"turned away: {welcome.refusal}" if welcome.refusal else "welcome")
        connection.settimeout(LIMIT_S)
        try:
            connection.sendall(content)
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            return said, False
        except OSError:
            pass
        return said, True


def frame(kind: int, control: bytes, buffers: tuple[memoryview, ...] = ()) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(kind, 0, 1, control, buffers))
