"""The PyTorch modes of a thread: modes that one call leaves behind must not affect the next.

Recording of gradients, inference mode, autocast, modes for torch functions, hooks for saved
tensors, a default device and some switches of autograd belong to a thread. The threads of a worker
serve one call after the other, so each of them is *untouched* when a task begins, and each
coroutine has its own modes.

Settings of the process are left to the program: the default dtype, deterministic algorithms,
anomaly detection. The number of threads that operations use is one as well, but PyTorch keeps it
by thread. A thread takes over the process's number only when PyTorch itself first shares out work
there; convolutions, which oneDNN shares out, would use all cores before. And a thread keeps its
number when another thread sets one. ``Threads`` makes it a setting of the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from torchweft.engine.threads.interrupts import call
from torchweft.errors import SerializationError

_native: Any = torch._C
_EXPECTED: dict[str, object] = {
    "is_grad_enabled": True,
    "is_inference_mode_enabled": False,
    "_is_any_autocast_enabled": False,
    "_len_torch_function_stack": 0,
    "_len_torch_dispatch_stack": 0,
    "_is_multithreading_enabled": True,
    "_is_fwd_grad_enabled": True,
    "_is_view_replay_enabled": False,
    "is_autocast_cache_enabled": True,
}
_AUTOCAST_DTYPES = {"cpu": torch.bfloat16}
"""What autocast computes in, by kind of device, on a thread that has not been told otherwise."""
if torch.version.cuda is not None:
    _AUTOCAST_DTYPES["cuda"] = torch.float16
# Older versions of torch do not report hooks for saved tensors, so there the hooks stay.
_top_hooks: Callable[[], Any] = partial(
    getattr(_native._autograd, "_top_saved_tensors_default_hooks", lambda _: None), False
)
_default: Any = torch._GLOBAL_DEVICE_CONTEXT
READERS: tuple[Callable[[], object], ...] = (
    *(getattr(_native, name) for name in _EXPECTED),
    _top_hooks,
    *(partial(torch.get_autocast_dtype, kind) for kind in _AUTOCAST_DTYPES),
)
UNTOUCHED = (*_EXPECTED.values(), None, *_AUTOCAST_DTYPES.values())
"""What ``READERS`` return on a thread without modes: ``tuple(map(call, READERS))`` takes 0.4 us."""


_AUTOCAST_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "privateuseone")
_for_good: list[Any] = []
"""Guards that end inference mode on a thread where the code that began it never will."""


count_threads: Callable[[], int] = torch.get_num_threads
"""Returns this thread's number of threads for operations; it takes over the process's number if it
has none of its own."""


class Threads:
    """The number of threads for operations that a task has set for the process.

    Attributes:
        wanted: The number; 0 if no task has set one.
    """

    def __init__(self) -> None:
        self.wanted = 0

    def follow(self) -> int:
        """Gives this thread the process's number; returns it."""
        count = count_threads()
        if self.wanted not in (0, count):
            count = self.wanted
            torch.set_num_threads(count)
        return count

    def note(self, before: int) -> None:
        """Makes the number that tasks of this thread have set that of the process.

        Args:
            before: What ``follow`` returned.
        """
        count = count_threads()
        if count != before:
            self.wanted = count


THREADS = Threads()


def end_modes() -> None:
    """Ends the modes that a task has left behind in this thread, if there are any."""
    if tuple(map(call, READERS)) != UNTOUCHED:
        tidy()


def tidy() -> None:
    """Ends all modes of this thread."""
    _take_default_device()
    _take_stacks()
    _end_autocast()
    if torch.is_inference_mode_enabled():
        _for_good.append(_without_inference())
    torch._C._set_grad_enabled(True)
    _native._set_multithreading_enabled(True)
    _native._set_fwd_grad_enabled(True)
    _native._set_view_replay_enabled(False)


class Modes:
    """The modes of a suspended coroutine, removed from its thread until ``put_back``."""

    def __init__(self) -> None:
        self._device = _take_default_device()
        self._stacks = _take_stacks()
        # On exit it also restores autocast and the switches of autograd.
        self._guard = _without_inference()
        self._autocast = _autocast_settings()
        self._nesting = _end_autocast()

    def put_back(self) -> None:
        """Restores the modes on this thread, which must be the same one and untouched."""
        self._guard.__exit__(None, None, None)
        _set_autocast(*self._autocast)
        for _ in range(self._nesting):
            torch.autocast_increment_nesting()
        functions, dispatchers, hooks = self._stacks
        for pack, unpack in reversed(hooks):
            _native._autograd._push_saved_tensors_default_hooks(pack, unpack)
        _put_modes(functions, dispatchers)
        _put_default_device(self._device)


def take_away() -> Modes | None:
    """Removes and returns the modes of this thread; None if it is untouched."""
    return None if tuple(map(call, READERS)) == UNTOUCHED else Modes()


has_dispatch_modes: Callable[[], int] = _native._len_torch_dispatch_stack
has_function_modes: Callable[[], int] = _native._len_torch_function_stack
_traced_graph: Callable[[], object] = _native._get_tracing_state
_MODES: tuple[Callable[[], object], ...] = (
    has_dispatch_modes,
    has_function_modes,
    _native._functorch.maybe_current_level,
    _traced_graph,
)
"""Functions that return something true where ``has_modes`` is true."""


def has_modes() -> bool:
    """Returns whether torch has modes or transforms of ``torch.func``, or ``torch.jit`` traces.

    Operations on tensors do what they say where this is false. Under torch's modes, such as
    ``FakeTensorMode``, they may return tensors without memory, and record instead of compute;
    within ``torch.func`` they may return wrappers of tensors. So the code that turns tensors into
    bytes, and bytes into tensors, runs in ``plain_operations`` otherwise.
    """
    return any(map(call, _MODES))


def check_untraced() -> None:
    """Raises SerializationError if a trace of PyTorch records this thread's operations.

    The result of a call would be a constant in it.
    """
    traces = sys.modules.get("torch.fx.experimental.proxy_tensor")
    is_traced = traces is not None and traces.get_proxy_mode() is not None
    if is_traced or _traced_graph() is not None:
        raise SerializationError(
            "PyTorch traces the code around a call, as make_fx, torch.export and torch.jit.trace "
            "do, and would record its result as a constant: trace what the remote function runs, "
            "on its worker"
        )


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    """Suspends torch's modes and transforms on this thread within a ``with`` block."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    functions, dispatchers = _take_modes()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        _put_modes(functions, dispatchers)


def _without_inference() -> Any:
    guard = _native._InferenceMode(False)
    guard.__enter__()
    return guard


def _take_default_device() -> Any:
    """Removes and returns this thread's default device; its mode is on the stack as well."""
    context = getattr(_default, "device_context", None)
    _put_default_device(None)
    return context


def _put_default_device(context: Any) -> None:
    if context is not None:
        _default.device_context = context
    elif hasattr(_default, "device_context"):
        # Deleted, not None: torch.get_default_device of older versions cannot read None.
        del _default.device_context


def _take_stacks() -> tuple[list[Any], list[Any], list[Any]]:
    """Empties the stacks of modes and hooks; returns their entries, the last first."""
    functions, dispatchers = _take_modes()
    hooks = []
    while (top := _top_hooks()) is not None:
        _native._autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    return functions, dispatchers, hooks


def _take_modes() -> tuple[list[Any], list[Any]]:
    functions, dispatchers = [], []
    while has_function_modes():
        functions.append(_native._pop_torch_function_stack())
    while has_dispatch_modes():
        dispatchers.append(_native._pop_torch_dispatch_stack(None))
    return functions, dispatchers


def _put_modes(functions: Sequence[Any], dispatchers: Sequence[Any]) -> None:
    for mode in reversed(functions):
        _native._push_on_torch_function_stack(mode)
    for mode in reversed(dispatchers):
        _native._push_on_torch_dispatch_stack(mode)


def _autocast_settings() -> tuple[bool, dict[str, torch.dtype]]:
    """Returns whether autocast keeps casts of weights, and what it computes in."""
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in _AUTOCAST_DTYPES}
    return torch.is_autocast_cache_enabled(), dtypes


def _set_autocast(is_cached: bool, dtypes: dict[str, torch.dtype]) -> None:
    torch.set_autocast_cache_enabled(is_cached)
    for kind, dtype in dtypes.items():
        torch.set_autocast_dtype(kind, dtype)


def _end_autocast() -> int:
    """Switches autocast off; returns this thread's nesting depth of autocast blocks."""
    _set_autocast(True, _AUTOCAST_DTYPES)
    if _native._is_any_autocast_enabled():
        for kind in _AUTOCAST_KINDS:
            with contextlib.suppress(RuntimeError):  # This version of torch does not know it.
                if torch.is_autocast_enabled(kind):
                    torch.set_autocast_enabled(kind, False)
    depth: int = torch.autocast_increment_nesting() - 1
    while torch.autocast_decrement_nesting() > 0:
        pass
    if depth:
        torch.clear_autocast_cache()  # Else it would be kept until the next block ends.
    return depth
