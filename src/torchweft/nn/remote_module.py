"""``RemoteModule``, a module on another worker that is used like a local module, and its chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn
from torch._guards import TracingContext

from torchweft.arguments import UNSET_RPC_TIMEOUT, check_type, kind_of, wrong_type
from torchweft.engine.codec.functions import describe
from torchweft.engine.codec.registry import has_callable_methods, rebuilds_plain
from torchweft.engine.codec.tracebacks import shorten, without_own_frames
from torchweft.engine.worker.current import current
from torchweft.errors import ArgumentTypeError, ConfigurationError, SerializationError
from torchweft.nn import owner
from torchweft.nn.owner import Step
from torchweft.rpc import Future, RRef, get_worker_info, rpc_sync
from torchweft.rpc.calls import call_and_wait, use
from torchweft.rpc.observed import info_of
from torchweft.rpc.worker import WORKER

# The placement of a module: a worker, and a device there

FORMS = "'worker', 'worker/cuda:0', 'rank:1' or 'rank:1/cuda:0'"
_RANK = "rank:"


class Placement(NamedTuple):
    """A worker, by name or by rank, and the name of a device there."""

    worker: str | int
    device: str


def read_placement(remote_device: object) -> Placement:
    """Parses a ``remote_device``; the default device is the CPU.

    Raises:
        ConfigurationError: It has none of the accepted forms.
    """
    if not isinstance(remote_device, str):
        raise wrong_type("remote_device", remote_device, f"pass a string like {FORMS}")
    worker, slash, device = remote_device.rpartition("/")
    if not slash:
        worker, device = remote_device, "cpu"
    rank = worker.removeprefix(_RANK) if worker.startswith(_RANK) else None
    problem = ""
    if not worker:
        problem = f"remote_device {remote_device!r} names no worker"
    elif rank is not None and not rank.isdecimal():
        problem = f"{rank!r} in remote_device {remote_device!r} is no rank"
    else:
        try:
            device = str(torch.device(device))
        except RuntimeError:
            problem = f"{device!r} in remote_device {remote_device!r} is no device"
    if problem:
        raise ConfigurationError(f"{problem}; pass {FORMS}")
    return Placement(worker if rank is None else int(rank), device)


# The methods of ``torch.nn.Module`` that a remote module does not support

Class = TypeVar("Class", bound=type)

_ON_OWNER = "call it where the module is: get_module_rref().remote().{name}(...)"
_IN_CLASS = "do so in the class of the module, which is made on its owner"
_LEFT_OUT = (
    "modules(), parameters(), buffers(), requires_grad_() and zero_grad() of a module around it "
    "would leave it out, as would an optimizer, clipping or DistributedDataParallel over them. "
    "Call them on the local parts, whose parameters torchweft.nn.local_parameters(model) returns; "
    "for this one call requires_grad_() of the RemoteModule, and pass remote_parameters() to "
    "DistributedOptimizer"
)
_DEVICE = "name the device when the module is made: RemoteModule('worker/cuda:0', ...)"
_PARAMETERS = "remote_parameters() returns references to them"

ALTERNATIVES = {
    **dict.fromkeys(["parameters", "named_parameters", "get_parameter"], _PARAMETERS),
    **dict.fromkeys(["buffers", "named_buffers", "get_buffer"], "state_dict() has copies of them"),
    **dict.fromkeys(["children", "named_children", "get_submodule"], "its owner alone has them"),
    "modules": _LEFT_OUT,
    **dict.fromkeys(["register_parameter", "register_buffer"], _IN_CLASS),
    **dict.fromkeys(["add_module", "register_module", "set_submodule"], _IN_CLASS),
    **dict.fromkeys(["register_state_dict_pre_hook", "register_state_dict_post_hook"], _IN_CLASS),
    "register_load_state_dict_pre_hook": _IN_CLASS,
    "get_extra_state": "state_dict() has it",
    "set_extra_state": "load_state_dict() takes it",
    **dict.fromkeys(["to", "to_empty", "cuda", "cpu", "ipu", "xpu", "mtia"], _DEVICE),
    **dict.fromkeys(["type", "float", "double", "half", "bfloat16"], _ON_OWNER),
    **dict.fromkeys(["share_memory", "compile"], _ON_OWNER),
    **dict.fromkeys(["register_backward_hook", "register_full_backward_hook"], _IN_CLASS),
    "register_full_backward_pre_hook": _IN_CLASS,
    "zero_grad": (
        "gradients are in autograd contexts, and each begins with none; for those of passes "
        "outside of contexts, call get_module_rref().rpc_sync().zero_grad()"
    ),
}
"""The alternative to each unsupported method, by its name."""


def refuse(alternatives: dict[str, str]) -> Callable[[Class], Class]:
    """Returns a class decorator that makes methods raise an error naming their alternative."""

    def decorate(decorated: Class) -> Class:
        for name, alternative in alternatives.items():
            setattr(decorated, name, _refusing(name, alternative.format(name=name)))
        return decorated

    return decorate


def _refusing(name: str, alternative: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _raise_unsupported(self, name, alternative)

    method.__name__ = name
    method.__qualname__ = f"RemoteModule.{name}"
    method.__doc__ = f"Raises ConfigurationError: {alternative}."
    return method


def _raise_unsupported(module: Any, name: str, alternative: str) -> NoReturn:
    raise ConfigurationError(
        f"Method ``{name}`` not supported for RemoteModule, whose module is on worker "
        f"{module.on!r}: {alternative}"
    )


def _use(
    module: RRef[nn.Module],
    way: str,
    device: str,
    steps: tuple[Step, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a module on its owner, then the steps; reports and errors name ``forward``."""
    args = (device, steps or None, *args)
    try:
        return use(module, way, owner.run, args, kwargs, UNSET_RPC_TIMEOUT, "forward")
    except Exception as error:
        shorten(error)
        raise


@has_callable_methods
class Chain:
    """Calls a remote module, then functions on its result, in one call to its owner.

    Only the last result travels. A decoder's logits have a row of the whole vocabulary for every
    word: 32 sequences of 64 words and a vocabulary of 30,000 are 246 MB in float32, and their
    gradients as much again. The loss is four bytes. So send the targets to the logits::

        loss = decoder.then(torch.nn.functional.cross_entropy, targets)(hidden)

    Made by ``RemoteModule.then``. A chain is immutable, so any threads may call it many times.
    Gradients flow through it as through any call of an autograd context: to parameters on the
    owner, and back to the caller's arguments of all its steps.

    Args:
        module: A reference to the module.
        device: The owner's device to which tensors among the arguments are moved.
        steps: The calls that follow the module.
    """

    def __init__(
        self, module: RRef[nn.Module], device: str = owner.HOST, steps: tuple[Step, ...] = ()
    ) -> None:
        self._module = module
        self._device = device
        self._steps = steps

    def then(self, function: Callable[..., Any] | RRef[Any], /, *args: Any, **kwargs: Any) -> Chain:
        """Returns a longer chain that ends with ``function(result so far, *args, **kwargs)``.

        Args:
            function: Any callable that can be sent, or a reference to a callable on the same
                owner: an ``RRef`` or a ``RemoteModule``.
            args: Further arguments of the function; they are sent with every call of the chain.
            kwargs: Keyword arguments of the function, sent likewise.

        Raises:
            ConfigurationError: ``function`` lives on another worker, or is not callable.
        """
        step = Step(self._checked(function), args, kwargs)
        return Chain(self._module, self._device, (*self._steps, step))

    def _checked(self, function: Any) -> Callable[..., Any] | RRef[Any]:
        function = getattr(function, "module_rref", function)
        if isinstance(function, RRef):
            if function.id.owner != self._module.id.owner:
                raise ConfigurationError(
                    f"{function!r} is not on worker {self._module.owner_name()!r}, where the chain "
                    "stays; call the two one after the other, or place them on one worker"
                )
        elif not callable(function):
            raise ArgumentTypeError(
                f"a chain cannot go on with {kind_of(function)}, which cannot be called; pass the "
                "function itself, and its further arguments behind it"
            )
        return function  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with these arguments, then the steps; returns the result. Blocks."""
        return _use(self._module, "sync", self._device, self._steps, args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the chain and returns a future of its last result."""
        found = _use(self._module, "async", self._device, self._steps, args, kwargs)
        return found  # type: ignore[no-any-return]

    def forward_remote(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Starts the chain; returns a reference to its last result, which stays on the owner."""
        found = _use(self._module, "remote", self._device, self._steps, args, kwargs)
        return found  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        names = "".join(
            f".then({getattr(step.function, '__name__', step.function)})" for step in self._steps
        )
        return f"<Chain {self._module!r}{names}>"


@has_callable_methods
@refuse(ALTERNATIVES)
class RemoteModule(nn.Module):
    """A ``torch.nn.Module`` that lives on another worker.

    Calling it runs the module there; under an autograd context gradients flow back through it.
    It can be sent in arguments and results, as a reference. It can also be part of a larger
    module. The larger module's ``train``, ``eval``, ``apply``, ``state_dict`` and
    ``load_state_dict`` reach the remote part as well, and so do ``double``, ``to(dtype)`` and the
    like. What would leave it out raises: ``parameters()``, ``modules()``, ``requires_grad_()`` and
    all that goes through them, and a move to another device. ``copy.deepcopy`` makes a copy on the
    owner, as for a target network.

    Methods that make no sense remotely, like ``parameters()`` or ``cuda()``, raise a
    ``ConfigurationError`` (a ``ValueError``) that names the alternative.

    Args:
        remote_device: The worker, and the device there if it is not the CPU: ``"ps"``,
            ``"ps/cuda:0"``, ``"rank:1"``, ``"rank:1/cpu"``.
        module_cls: The class of the module, or a function that makes a module on the owner.
        args: Positional arguments of ``module_cls``.
        kwargs: Keyword arguments of ``module_cls``.

    Attributes:
        on: Name of the worker where the module lives.
        device: Its device there. Tensors on the CPU among the arguments of ``forward`` are moved
            to it; results are not moved.
        module_rref: A reference to the module.

    Raises:
        ConfigurationError: An argument is invalid.
        UnknownWorker: There is no such worker.
        Exception: The error of the module's constructor.

    Example::

        decoder = RemoteModule("ps", torch.nn.Linear, args=(512, 30_000))
        optimizer = DistributedOptimizer(torch.optim.Adagrad, decoder.remote_parameters(), lr=0.1)
        with torchweft.autograd.context() as context_id:
            # The logits stay on "ps": only the loss travels.
            loss = decoder.then(torch.nn.functional.cross_entropy, targets)(hidden)
            torchweft.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    on: str
    device: str
    module_rref: RRef[nn.Module]

    @without_own_frames
    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        placement = read_placement(remote_device)
        _check_module_class(module_cls, args, kwargs)
        agent = current()
        module_rref = call_and_wait(
            agent.slots[WORKER],
            agent.find(placement.worker),
            owner.create,
            (module_cls, tuple(args or ()), dict(kwargs or {}), placement.device),
            {},
            UNSET_RPC_TIMEOUT,
            describe(module_cls),
        )
        super().__init__()
        self._bind(module_rref, placement.device)

    def _bind(self, module_rref: RRef[nn.Module], device: str) -> None:
        self.module_rref = module_rref
        self.device = device
        self.on = module_rref.owner_name()

    @classmethod
    def from_module_rref(cls, module_rref: RRef[Any], device: str = owner.HOST) -> RemoteModule:
        """Returns a remote module for an existing module.

        Args:
            module_rref: A reference to the module.
            device: Its device on its owner.

        Raises:
            ConfigurationError: ``module_rref`` is not a reference.
        """
        check_type(module_rref, RRef, "module_rref", "an RRef to a module")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._bind(module_rref, device)
        return made

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[Any]) -> RemoteModule:
        """Returns a remote module for an existing module, and checks its owner.

        Args:
            remote_device: The worker that owns the module, and its device there; see the class.
            module_rref: A reference to the module.

        Raises:
            ConfigurationError: Another worker owns it, or an argument is invalid.
        """
        placement = read_placement(remote_device)
        made = cls.from_module_rref(module_rref, placement.device)
        worker = get_worker_info(placement.worker)
        if worker != module_rref.owner():
            raise ConfigurationError(
                f"remote_device names worker {worker.name!r}, but {module_rref!r} is elsewhere; "
                "pass the worker that owns it"
            )
        return made

    # Calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module on its owner and returns its result. Blocks.

        Args:
            args: Arguments of the module. Tensors on the CPU are moved to ``device``.
            kwargs: Keyword arguments of the module, likewise.

        Raises:
            CallTimeout: There was no result within the default timeout of calls.
            WorkerLost: The owner is lost.
            SerializationError: An argument or the result cannot be sent.
            Exception: The error of the module.
        """
        return _use(self.module_rref, "sync", self.device, (), args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a call of the module on its owner and returns a future of its result.

        Arguments are those of ``forward``; the future's ``wait`` raises its errors.
        """
        return Chain(self.module_rref, self.device).forward_async(*args, **kwargs)

    def forward_remote(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Starts a call of the module; returns a reference to its result, which stays there.

        Arguments are those of ``forward``; the reference's ``to_here`` raises its errors.
        """
        return Chain(self.module_rref, self.device).forward_remote(*args, **kwargs)

    def then(self, function: Callable[..., Any] | RRef[Any], /, *args: Any, **kwargs: Any) -> Chain:
        """Returns a chain: calls the module, then a function on the result, all on the owner.

        ``decoder.then(cross_entropy, targets)(hidden)`` is
        ``cross_entropy(decoder(hidden), targets)``, but the decoder's result does not travel.
        Chains have ``then`` and ``forward_async`` too. See ``Chain.then``.

        Args:
            function: Any callable that can be sent, or a reference to a callable on the owner.
            args: Its arguments after the result of the module.
            kwargs: Its keyword arguments.

        Raises:
            ConfigurationError: ``function`` lives on another worker, or is not callable.
        """
        return Chain(self.module_rref, self.device).then(function, *args, **kwargs)

    # The module itself

    def get_module_rref(self) -> RRef[nn.Module]:
        """Returns a reference to the module."""
        return self.module_rref

    @without_own_frames
    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Returns references to its parameters, for ``DistributedOptimizer``. Blocks.

        Args:
            recurse: Whether to include parameters of submodules.

        Raises:
            WorkerLost: The owner is lost.
        """
        return self._ask(owner.parameters, recurse)  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> RemoteModule:
        """Switches the module to training, or evaluation, on its owner. Blocks.

        Args:
            mode: True for training, False for evaluation.

        Raises:
            WorkerLost: The owner is lost.
        """
        self._ask(owner.set_training, mode)
        self.training = mode
        return self

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Raises ConfigurationError: ``modules()`` of a module around it would leave it out."""
        # ``torch.compile`` looks for the parameters that it holds, and no others; it makes no call.
        if TracingContext.try_get() is None:
            _raise_unsupported(self, "named_modules", _LEFT_OUT)
        found: Iterator[tuple[str, nn.Module]]
        found = super().named_modules(memo, prefix, remove_duplicate)
        return found

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Freezes the module on its owner, or has it learn again. Blocks.

        Args:
            requires_grad: Whether its parameters get gradients.

        Raises:
            WorkerLost: The owner is lost.
        """
        self._ask(owner.set_requires_grad, requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> RemoteModule:
        """Applies ``fn`` to the module and its submodules on the owner. Blocks.

        Args:
            fn: A function of a module that can be sent.

        Raises:
            WorkerLost: The owner is lost.
            Exception: The error of ``fn``.
        """
        self._ask(owner.apply, fn)
        return self

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns the module's state, copied if it is on another worker. Blocks.

        A module that contains this one saves it with its own state.

        Args:
            destination: The dict to add the state to; by default a new dict.
            prefix: The prefix of each key.
            keep_vars: Must be False: the parameters themselves are on the owner.

        Returns:
            The tensors by name, on the devices that device maps name.

        Raises:
            ConfigurationError: ``keep_vars`` is True.
            WorkerLost: The owner is lost.
        """
        if keep_vars:
            raise ConfigurationError(
                "state_dict(keep_vars=True) asks for the parameters themselves; those of this "
                f"RemoteModule are on worker {self.on!r}: leave keep_vars out for copies, or use "
                "remote_parameters()"
            )
        state: dict[str, Any] = self._ask(owner.state, prefix)
        if destination is None:
            return state
        destination.update(state)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(getattr(state, "_metadata", {}))
        return destination  # type: ignore[no-any-return]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads this module's part of a state; the base class calls it for every submodule."""
        own = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        missing, unexpected, error = self._ask(owner.load_state, own, assign)
        missing_keys += [prefix + key for key in missing]
        unexpected_keys += [prefix + key for key in unexpected] if strict else []
        error_msgs += [error] if error else []

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RemoteModule:
        """Converts the tensors on the owner; a module around this one calls it in ``to``."""
        try:
            self._ask(owner.convert, fn, recurse)
        except SerializationError as error:
            raise SerializationError(
                f"a conversion of the module around a RemoteModule cannot reach the latter on "
                f"worker {self.on!r} ({error}): have the function that makes the module there "
                "return it in this form, and convert the local parts alone"
            ) from None
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise ConfigurationError(
                f"a RemoteModule takes no submodule {name!r}: its module is on worker "
                f"{self.on!r}, and would not have it; {_IN_CLASS}"
            )
        super().__setattr__(name, value)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return rpc_sync(info_of(self.module_rref.id.owner), function, (self.module_rref, *args))

    def __deepcopy__(self, memo: object) -> RemoteModule:
        """Returns a remote module for a deep copy, which is made on the owner. Blocks."""
        made = type(self).from_module_rref(self._ask(owner.duplicate), self.device)
        made.training = self.training
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.module_rref, self.device, self.training)

    def extra_repr(self) -> str:
        """Returns the reference and the device for ``repr``."""
        return f"{self.module_rref!r}, device={self.device!r}"


@rebuilds_plain
def _received(module_rref: RRef[nn.Module], device: str, training: bool) -> RemoteModule:
    made = RemoteModule.from_module_rref(module_rref, device)
    made.training = training
    return made


def _check_module_class(module_cls: object, args: object, kwargs: object) -> None:
    if not (args is None or isinstance(args, Sequence)) or isinstance(args, str):
        raise wrong_type("args", args, "pass a tuple, args=(value,) for a single argument")
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise wrong_type("kwargs", kwargs, "pass a dict")
    if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
        raise ArgumentTypeError(f"{owner.EXPECTED}, but {module_cls.__name__} is no subclass of it")
    if isinstance(module_cls, nn.Module) or not callable(module_cls):
        fix = "pass a class, and its arguments as args=(...) and kwargs={...}"
        raise wrong_type("module_cls", module_cls, fix)


# Modules that contain remote modules: the part of them in this process


def local_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and its submodules, each once, without remote modules."""
    seen: set[int] = set()
    todo = [module]
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, RemoteModule):
            seen.add(id(each))
            yield each
            todo += reversed(list(each.children()))


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a module that are in this process, each once.

    ``parameters()`` of a module that contains a ``RemoteModule`` raises, since it would leave some
    out. This returns those of the local parts, in the order in which ``parameters()`` would.

    Args:
        module: Any module.

    Example::

        references = [
            *model.encoder.remote_parameters(),
            *map(torchweft.RRef, torchweft.nn.local_parameters(model)),
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    """
    parameters: dict[int, nn.Parameter] = {}
    for each in local_modules(module):
        for parameter in each.parameters(recurse=False):
            parameters.setdefault(id(parameter), parameter)
    return list(parameters.values())
