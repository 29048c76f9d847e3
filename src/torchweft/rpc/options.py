"""The options with which a worker joins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchweft import knobs
from torchweft.arguments import checked_int, kind_of, wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc.constants import DEFAULT_INIT_METHOD
from torchweft.rpc.rref import RRef
from torchweft.rpc.tensorpipe import TensorPipeRpcBackendOptions
from torchweft.secret import Secret
from torchweft.serialize.allowed import BY_ITSELF, is_part_of_weft
from torchweft.serialize.callables import Callables
from torchweft.transport.addresses import is_loopback
from torchweft.transport.secure import TlsOptions


def _allowed_from_outside() -> tuple[str, ...] | None:
    modules = [module.strip() for module in knobs.ALLOWED_MODULES.get().split(",")]
    return tuple(module for module in modules if module) or None


@dataclass
class RpcBackendOptions:
    """Options of one worker.

    Attributes:
        num_worker_threads: Number of user functions that run at a time. A function that waits for
            another worker does not count, so circular calls never run out of threads.
        rpc_timeout: Default timeout of calls, in seconds; 0 for no limit.
        init_method: How the workers find each other: ``env://`` (``MASTER_ADDR`` and
            ``MASTER_PORT``, as ``torchweft run`` and ``torchrun`` set them), ``tcp://host:port``
            (where rank 0 runs), or ``file:///path`` (on a file system that all share).
        store: A ``torch.distributed.Store`` to use instead of ``init_method``; a group needs one
            without keys of an earlier group.
        init_timeout: Seconds to wait for all workers to join.
        listen: Address of this machine on which other hosts can reach this worker; needs a
            ``secret``. By default the address in ``WEFT_LISTEN``. If that is empty: with a secret,
            this machine's address on the way to the rendezvous store; without a secret, none, so
            that only workers of this host connect.
        secret: Secret that all workers of the group share and nobody else has. By default taken
            from ``WEFT_SECRET_FILE`` or ``WEFT_SECRET``. Without a secret, only workers of the
            same user on the same host can connect to each other.
        tls: TLS settings for TCP connections; give them to all workers. By default taken from the
            ``WEFT_TLS_...`` variables.
        detection_time: Seconds without an answer from another worker's machine after which that
            worker is lost. The machine of a busy worker answers.
        reconnect_time: Seconds within which a broken connection is made again; after them the
            worker at its other end is lost.
        reference_type: Class of the references that this worker makes and receives; a subclass
            of ``RRef``.
        copy_to_self: Whether tensors in calls of this worker to itself are copied, as in calls to
            other workers. By default both sides have the same tensors.
        lost_gradients: Effect on a local backward pass, ``loss.backward()``, that ends in a tensor
            which another worker computed, and sent outside of an autograd context. ``"raise"``:
            it raises an ``AutogradError``. ``"warn"``: the graph is not kept, the tensor is a
            leaf, and the first such pass warns, as in ``torch.distributed.rpc``.
        allowed_modules: Modules, with their submodules, whose functions and classes others may
            call on or send to this worker; ``"torch"`` means its parts that compute. By default
            the modules in ``WEFT_ALLOWED_MODULES``; None if it is unset, which allows all. A guard
            against mistakes, not against attackers; cannot be combined with ``strict``.
        strict: Whether this worker refuses pickles (it accepts tensors, numbers, texts, references
            and containers of them), runs only functions that are registered (``rpc.register``),
            and calls only methods that are declared (``rpc.expose``). See the page on callables.
        callables: Functions and classes that other workers may call on a strict worker, beside
            those that the program registers: ``(torch.nn.Linear, torch.optim.SGD)``.
    """

    num_worker_threads: int = field(default_factory=knobs.WORKER_THREADS.get)
    rpc_timeout: float = field(default_factory=knobs.RPC_TIMEOUT_S.get)
    init_method: str | None = None
    store: Any = None
    init_timeout: float = field(default_factory=knobs.INIT_TIMEOUT_S.get)
    listen: str = field(default_factory=knobs.LISTEN.get)
    secret: Secret | None = field(default_factory=Secret.from_environment)
    tls: TlsOptions | None = field(default_factory=TlsOptions.from_environment)
    detection_time: float = field(default_factory=knobs.DETECTION_S.get)
    reconnect_time: float = field(default_factory=knobs.RECONNECT_S.get)
    reference_type: type[RRef[Any]] = RRef
    copy_to_self: bool = False
    lost_gradients: Literal["raise", "warn"] = "raise"
    allowed_modules: Sequence[str] | None = field(default_factory=_allowed_from_outside)
    strict: bool = False
    callables: Sequence[Any] = ()

    @property
    def default_timeout_s(self) -> float:
        """``rpc_timeout`` with infinity for no limit."""
        return self.rpc_timeout or math.inf

    def check(self) -> None:
        """Raises ConfigurationError for the first invalid value."""
        if checked_int("num_worker_threads", self.num_worker_threads) < 1:
            raise ConfigurationError(
                f"num_worker_threads is {self.num_worker_threads!r}; it must be at least 1"
            )
        if not _number("rpc_timeout", self.rpc_timeout) >= 0:
            raise ConfigurationError(
                f"rpc_timeout is {self.rpc_timeout!r}; it must be a number of seconds, "
                "or 0 for no limit"
            )
        if not 0 < _number("init_timeout", self.init_timeout) < math.inf:
            raise ConfigurationError(
                f"init_timeout is {self.init_timeout!r}; it must be a positive number of seconds"
            )
        for name in ("detection_time", "reconnect_time"):
            value = _number(name, getattr(self, name))
            if not 0.5 <= value < math.inf:
                raise ConfigurationError(f"{name} is {value!r}; it must be 0.5 seconds at least")
        for name in ("init_method", "listen"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise wrong_type(name, text, "pass a str")
        if self.lost_gradients not in ("raise", "warn"):
            raise ConfigurationError(
                f"lost_gradients is {self.lost_gradients!r}; it must be 'raise' or 'warn'"
            )
        self._check_protection()
        if self.store is not None and self.init_method is not None:
            raise ConfigurationError("give init_method or store, not both")
        self._check_callables()
        self._check_modules()

    def _check_callables(self) -> None:
        if isinstance(self.callables, str) or not isinstance(self.callables, Iterable):
            raise ArgumentTypeError(
                f"callables is a {type(self.callables).__name__}; pass a tuple of functions and "
                "classes like (torch.nn.Linear, my_module.evaluate)"
            )
        if not self.strict:
            if self.callables:
                raise ConfigurationError(
                    "callables is for a strict worker, and this one would run anything; pass "
                    "strict=True as well"
                )
            return
        Callables(self.callables)
        if self.allowed_modules is not None:
            raise ConfigurationError(
                "a strict worker takes no allowed_modules (or WEFT_ALLOWED_MODULES): it runs what "
                "is registered one by one, as modules contain more than one knows; put "
                "@rpc.register above the functions that others call, or name them in "
                "callables=(...)"
            )

    def _check_modules(self) -> None:
        modules = self.allowed_modules
        if modules is None:
            return
        if isinstance(modules, str) or not isinstance(modules, Iterable):
            raise wrong_type(
                "allowed_modules",
                modules,
                "pass a tuple of names like ('my_package', 'torch'), or None for all",
            )
        for module in modules:
            if not isinstance(module, str) or not all(map(str.isidentifier, module.split("."))):
                raise ConfigurationError(
                    f"allowed_modules has {module!r}, which is no name of a module"
                )
            if module == "builtins":
                raise ConfigurationError(
                    "allowed_modules must not have 'builtins': it has eval and __import__; what "
                    "is harmless in it needs no entry"
                )
            if is_part_of_weft(module) and not module.startswith(BY_ITSELF):
                raise ConfigurationError(
                    f"allowed_modules must not have {module!r}: what Weft calls on other workers "
                    f"needs no entry, but for {BY_ITSELF!r}"
                )

    def _check_protection(self) -> None:
        if self.secret is not None and not isinstance(self.secret, Secret):
            # Do not show the value: it may be the secret.
            raise ArgumentTypeError(
                f"secret is {kind_of(self.secret)}; pass torchweft.Secret.from_file(path)"
            )
        if self.tls is not None:
            if not isinstance(self.tls, TlsOptions):
                raise wrong_type("tls", self.tls, "pass torchweft.TlsOptions(...)")
            self.tls.check()
        if not isinstance(self.listen, str):
            raise ConfigurationError(
                f"listen is {self.listen!r}; pass an address of this machine like '10.0.0.1'"
            )
        if self.secret is None and self.listen and not is_loopback(self.listen):
            raise ConfigurationError(
                f"this worker is to listen on {self.listen!r}, where other machines reach it, but "
                "there is no secret: any program that reaches it could run code here. Make one "
                "with 'torchweft secret new FILE', copy it to every host, and set "
                f"{knobs.SECRET_FILE.variable}=FILE there (or pass secret=...)"
            )


def from_tensorpipe(given: TensorPipeRpcBackendOptions, **others: Any) -> RpcBackendOptions:
    """Converts PyTorch's options, and adds ``others``, which PyTorch's options lack."""
    if "store" not in others and given.init_method != DEFAULT_INIT_METHOD:
        others["init_method"] = given.init_method
    return RpcBackendOptions(
        num_worker_threads=given.num_worker_threads, rpc_timeout=given.rpc_timeout, **others
    )


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise wrong_type(name, value, "pass a number of seconds")
    return value
