"""Messages that a member may send to a strict worker: well formed where that gets them further.

A call names anything, and has fitting arguments, with some of them replaced. Values nest names,
calls of functions that make objects, references, and tensors with false tables. Statements about
references are true most of the time, or a message would end at the first of them.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.free_encoder import (
    Attributed,
    FreeEncoder,
    Home,
    Keys,
    Made,
    Named,
    Numbered,
    Ordered,
)
from tests.fuzz.strict.world import HANDED, ME, OTHER, SENDER
from tests.marked import names_of
from torchweft.autograd import codec
from torchweft.autograd.codec import PassMode
from torchweft.engine.codec import values as tags
from torchweft.engine.codec.registry import (
    rebuilds_pickled,
    rebuilds_plain,
    remotely_callable,
    remotely_callable_unless_strict,
)
from torchweft.engine.codec.tensors import as_memory, describe, encode_tensors
from torchweft.engine.protocol import references
from torchweft.engine.protocol.backward import (
    Abort,
    Discover,
    Failed,
    Gradients,
    Progress,
    Report,
    Settled,
)
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
    NAMED,
    NO_CREATION,
    TABLES,
    HandedReference,
    Kind,
    encode_call,
    encode_ints,
    encode_reply,
    encode_tables,
)
from torchweft.ids import ReferenceId, scoped_id

_PROGRAM = "tests.fuzz.strict.program"
_REGISTERED = [
    *(f"{_PROGRAM}:{name}" for name in ("identity", "add", "soon", "fail", "give_trap")),
    *(f"{_PROGRAM}:Net", f"{_PROGRAM}:Counter", "torch:mul", "torch.optim.sgd:SGD"),
    *("torch.optim.adam:Adam", "torch._C._VariableFunctions:mul"),
]
_FORBIDDEN = [
    *("os:system", "posix:system", "builtins:eval", "builtins:exec", "builtins:__import__"),
    *("builtins:open", "builtins:getattr", "builtins:dict", "builtins:object", "this:d"),
    *("subprocess:Popen", "pickle:loads", "torch:load", "torch:save", "torch:compile"),
    *("torch.hub:load", "torch.jit:load", "numpy:ndarray", "numpy:load", "numpy:frombuffer"),
    *("torch.utils.cpp_extension:load_inline", "torch._C:_jit_pass_inline", "torch:from_file"),
    *("torch.nn.utils._deprecation_utils:lazy_deprecated_import", "torch:ops.aten.add"),
    *("torch.sparse._triton_ops_meta:dump", "torch.nn.modules.module:Module.compile"),
    *("torch:Tensor", "torch:sparse_coo_tensor", "torch:as_strided", "torch._C:TensorBase.set_"),
    *(f"{_PROGRAM}:{name}" for name in ("unregistered", "Unregistered", "Trap", "_sing", "sung")),
    *(f"{_PROGRAM}:Counter.reset", f"{_PROGRAM}:Counter.add", f"{_PROGRAM}:Unregistered.make"),
    *(f"{_PROGRAM}:identity.__globals__.get", f"{_PROGRAM}:Counter.__init__"),
    *("torchweft.engine.codec.objects:unpack", "torchweft.engine.codec.functions:resolve"),
    *("torchweft.engine.codec.registry:register", "torchweft.rpc.serving:method_of"),
    *("torchweft.checkpoint.owners:discard", "torchweft.checkpoint.owners:write"),
    *("torchweft.rpc.joining:shutdown", "torchweft.compat.rpc.internal:run_pickled"),
    *("builtins:ValueError", "builtins:ImportError", "torchweft.errors:NotAllowed", ":", "", "a:b"),
]
_STRICT = sorted(names_of(remotely_callable))
_ENTRIES = sorted(names_of(remotely_callable, remotely_callable_unless_strict))
_MAKERS = sorted(names_of(rebuilds_plain, rebuilds_pickled))
_GOOD_MAKERS = sorted(names_of(rebuilds_plain))
_METHODS = [
    *("add", "__call__", "reset", "unlisted", "forward", "train", "state_dict", "parameters"),
    *("apply", "compile", "fill_", "to_sparse", "indices", "set_", "resize_", "as_strided", "step"),
    *("append", "format", "__class__", "__init__", "__reduce__", "__getattribute__", "__dict__"),
    *("__len__", "__getitem__", "__globals__", "load_state_dict", "register_forward_hook", "data"),
]
_ERRORS = [
    *("ValueError", "ImportError", "OSError", "UnicodeDecodeError", "SyntaxError", "KeyError"),
    *("SystemExit", "KeyboardInterrupt", "StopIteration", "ExceptionGroup", "AttributeError"),
    *("eval", "object", "BaseException", "NameError", "MemoryError"),
]
_INTEGERS = (0, 1, 2, 3, 7, -1, 255, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63))
_DTYPES = (torch.float32, torch.float32, torch.int64, torch.int8, torch.bool, torch.complex64)
_DTYPES += (torch.float64, torch.bfloat16, torch.uint8)
_MODULE, _WEIGHT, _BIAS, _OPTIMIZER, _TRAP, _HIDDEN, _COUNTER, _MATRIX, _LIST, _TEXT = range(10)
_VALUES = 10


class Grammar:
    """Makes messages. The same random numbers make the same messages.

    Args:
        chance: The source of all decisions.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._handed: list[HandedReference] = []

    # Messages

    def message(self) -> bytes:
        """Returns one to three frames."""
        frames = [self._frame() for _ in range(self.chance.choice((1, 1, 1, 1, 2, 3)))]
        return b"".join(frames)

    def _frame(self) -> bytes:
        self._handed = []
        make: Callable[[], bytes] = self.chance.choice(_FRAMES).__get__(self)
        return make()

    def _call_message(self) -> bytes:
        name, args = self._call()
        chance, flags = self.chance, 0
        content: Any = tuple(args)
        choice = chance.random()
        if choice < 0.1:
            content, flags = (*args, self.value(1), (self._word(0),)), NAMED
        elif choice < 0.15:
            content, name = (self._function(), *args), b""
        elif choice < 0.2:
            content, flags = self.value(3), chance.choice((0, NAMED))
        span = b"" if chance.random() < 0.95 else chance.randbytes(20)
        payload, tensors = self._payload(content)
        head = (self._seconds(), self._creation(), *self._context())
        front = encode_call(*head, name, span, tuple(self._handed), payload)
        return self._with_tensors(Kind.CALL, flags, self._number(), front, tensors)

    def _with_tensors(
        self, kind: Kind, flags: int, number: int, front: bytes, tensors: list[Tensor]
    ) -> bytes:
        """Returns a message with its tensors, inside of it or by tables."""
        inlined = encode_tensors(tensors) if self.chance.random() < 0.5 else None
        if inlined is not None:
            inside = self._lie(inlined[0])
            return _joined(encode_frame(kind, flags, number, front + inside))
        table, flat = describe(tensors) if tensors else (b"", [])
        table, buffers = self._lie(table), [as_memory(each) for each in flat]
        channels = b"" if self.chance.random() < 0.97 else self.chance.randbytes(24)
        control = front + encode_tables(table, channels)
        return _joined(encode_frame(kind, flags | TABLES, number, control, buffers))

    def _lie(self, table: bytes) -> bytes:
        """Returns what describes tensors with some of its numbers changed."""
        if not table or self.chance.random() < 0.6:
            return table
        changed = bytearray(table)
        for _ in range(self.chance.choice((1, 1, 2, 4))):
            at = self.chance.randrange(len(changed))
            if self.chance.random() < 0.5:
                changed[at] = self.chance.choice((0, 1, 2, 4, 8, 12, 63, 255))
            else:
                wide = (self.chance.choice(_INTEGERS) & ((1 << 64) - 1)).to_bytes(8, "little")
                changed[at : at + 8] = wide[: max(len(changed) - at, 0)]
        return bytes(changed)

    def _reply(self) -> bytes:
        if self.chance.random() < 0.5:
            payload, tensors = self._payload(self.value(3))
            front = encode_reply(*self._context(), tuple(self._handed), payload)
            return self._with_tensors(Kind.REPLY, 0, self._number(), front, tensors)
        control = encode_reply(0, 0, (), self.error())
        return _joined(encode_frame(Kind.REPLY, ERROR_REPLY, self._number(), control))

    def _gradients(self) -> bytes:
        values = [self._gradient() for _ in range(self.chance.choice((1, 1, 2)))]
        name = self._pass()
        message = Gradients(self._message_id(), [], self._progress())
        recorded = self.chance.choice((0, 0, self._message_id()))
        payload, tensors = self._payload(values)
        front = codec.encode(name, message, recorded, payload)
        flags = name.mode.flags
        return self._with_tensors(Kind.GRADIENTS, flags, name.pass_id, front, tensors)

    def _gradient(self) -> Any:
        if self.chance.random() < 0.6:
            return torch.ones(self.chance.choice(((2, 2), (2,), (), (3,), (2, 2, 2))))
        return self.value(1)

    def _pass(self) -> codec.PassName:
        pass_id = scoped_id(self.chance.choice((SENDER, SENDER, OTHER, ME)), self._small())
        mode = PassMode(self.chance.random() < 0.3, self.chance.random() < 0.3)
        return codec.PassName(self._context_id(), pass_id, pass_id - self._small(), mode)

    def _progress(self) -> Progress | None:
        if self.chance.random() < 0.5:
            return None
        return Progress(*([self._message_id() for _ in range(self._small() % 2)] for _ in "1234"))

    def _backward(self) -> bytes:
        error = self.error()
        message: Any = self.chance.choice(
            (
                Abort(),
                Settled(),
                Discover(tuple(self._message_id() for _ in range(self._small() % 3))),
                Report(self._progress() or Progress([], [], [], [])),
                Failed(self.chance.choice((ME, SENDER, OTHER, 9)), "operation", error),
            )
        )
        name = self._pass()
        control = codec.encode(name, message)
        return _joined(encode_frame(Kind.BACKWARD, name.mode.flags, name.pass_id, control))

    def _references(self) -> bytes:
        kinds = list(references.REFERENCE_RULES)
        messages = []
        for _ in range(self.chance.choice((1, 2))):
            kind = self.chance.choice(kinds)
            fields = kind.__annotations__
            made = [self._id() if name == "reference" else self._small() for name in fields]
            messages.append(kind(*made))
        return _joined(encode_frame(Kind.REFERENCES, 0, 0, references.encode(messages)))

    def _integers(self) -> bytes:
        kinds = (Kind.CANCEL, Kind.PULLED, Kind.SUPPLY, Kind.RELEASE_CONTEXT, Kind.UNSENT)
        values = [self._small() for _ in range(self.chance.choice((1, 1, 2)))]
        kind = self.chance.choice(kinds)
        if kind is Kind.SUPPLY and len(values) > 1:
            values.append(values[0] % 2)  # Else the request has too few numbers.
        return _joined(encode_frame(kind, 0, self._number(), encode_ints(*values)))

    def _other(self) -> bytes:
        content = self.chance.randbytes(self.chance.choice((0, 4, 8, 24, 60)))
        kind = self.chance.choice(list(Kind))
        return _joined(encode_frame(kind, self._small() % 4, self._number(), content))

    # Calls

    def _call(self) -> tuple[bytes, Any]:
        chance = self.chance
        choice = chance.random()
        if choice < 0.55:
            name = chance.choice(_STRICT)
            return name.encode(), self._some_replaced(self._fitting(name))
        if choice < 0.75:
            name = chance.choice(_REGISTERED)
            return name.encode(), tuple(self.value(2) for _ in range(chance.choice((0, 1, 2, 2))))
        return self._name(), tuple(self.value(2) for _ in range(chance.choice((0, 1, 2, 3))))

    def _some_replaced(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        share = self.chance.choice((0.0, 0.15, 0.3, 1.0))
        made = [self.value(2) if self.chance.random() < share else each for each in args]
        if self.chance.random() < 0.05:
            made.append(self.value(1))
        return tuple(made)

    def _fitting(self, name: str) -> tuple[Any, ...]:
        chance, reference = self.chance, self._reference
        module = reference(chance.choice((_MODULE, _MODULE, _HIDDEN, _TRAP, _COUNTER, _MATRIX)))
        rows = torch.ones(chance.choice((1, 3)), 2)
        device = chance.choice(("cpu", "cpu", "cpu", "cuda", "meta", "nonsense", "cpu:0"))
        steps = tuple(self._step() for _ in range(chance.choice((0, 0, 1, 2))))
        address = self._address(chance.choice((_MODULE, _TRAP, _HIDDEN, _COUNTER, _MATRIX)))
        members = [(0, self._address(chance.randrange(_VALUES))) for _ in range(2)]
        optimizer = self._address(chance.choice((_OPTIMIZER, _OPTIMIZER, _TRAP)))
        key = self._key()
        short = name.rpartition(".")[2]
        fitting: dict[str, Callable[[], tuple[Any, ...]]] = {
            "shared:content": lambda: (address,),
            "shared:make": lambda: (self._map_payload(), [torch.ones(2)], chance.choice((1, 2))),
            "shared:pull": lambda: (reference(chance.randrange(_VALUES)),),
            "shared:run": lambda: (address, (rows,), {}, 0, -1),
            "recorder:begin": lambda: (
                chance.randrange(3),
                chance.choice((0, 1, 1000, 1 << 40)),
                False,
            ),
            "recorder:end": lambda: (chance.randrange(3),),
            "recorder:forget": lambda: (chance.randrange(3),),
            "recorder:read_clock": lambda: (),
            "recorder:take": lambda: (chance.randrange(3),),
            "ending:failed": lambda: ("a cause",),
            "examining:read_time": lambda: (),
            "examining:tell_host": lambda: (),
            "examining:tell_pair": lambda: ("sender", 1.0),
            "examining:weigh": lambda: (rows,),
            "owner:apply": lambda: (module, self._function()),
            "owner:convert": lambda: (module, self._function(), chance.random() < 0.5),
            "owner:create": lambda: (self._function(), (), {}, device),
            "owner:duplicate": lambda: (module,),
            "owner:load_state": lambda: (module, self._state()),
            "owner:parameters": lambda: (module, True),
            "owner:run": lambda: (*address, chance.choice((None, module)), device, steps, rows),
            "owner:set_requires_grad": lambda: (module, chance.random() < 0.5),
            "owner:set_training": lambda: (module, chance.random() < 0.5),
            "owner:state": lambda: (module, ""),
            "clipping:norms": lambda: (
                [self._context_id() for _ in range(chance.randrange(3))],
                members,
                chance.choice((2.0, math.inf)),
            ),
            "clipping:scale": lambda: (self._context_id(), members, torch.tensor(0.5)),
            "local:change": lambda: (optimizer, self._changes()),
            "local:load": lambda: (optimizer, self._saved()),
            "local:place": lambda: (
                chance.choice((None, None, reference(_OPTIMIZER), reference(_TRAP))),
                self._function(("torch.optim.sgd:SGD", "torch.optim.adam:Adam")),
                (),
                chance.choice(({}, {"lr": 0.1}, {"fused": True}, {"foreach": True})),
                [self._part()],
            ),
            "local:save": lambda: (optimizer, self._changes()),
            "local:step": lambda: (optimizer, self._context_id(), self._changes()),
            "cluster_store:has_joined": lambda: (),
            "collective:bring": lambda: (
                key,
                self.value(1),
                chance.choice((None, self._weft_error())),
            ),
            "collective:tell": lambda: (
                key,
                {"sender": self.value(1)},
                chance.choice((None, self._weft_error())),
            ),
            "proxies:construct": lambda: (self._function(), (self.value(1),), {}),
            "proxies:read": lambda: (
                *self._address(chance.randrange(_VALUES)),
                None,
                chance.choice(_METHODS),
            ),
            "serving:backward_from": lambda: (
                *address,
                None,
                chance.choice((-1, self._context_id())),
                True,
            ),
            "serving:call_method": lambda: (
                *self._address(chance.randrange(_VALUES)),
                None,
                chance.choice(_METHODS),
                *chance.choice(((), (1,), (self.value(1),))),
            ),
            "serving:fetch": lambda: (*self._address(chance.randrange(_VALUES)), None),
            "streams:begin": lambda: chance.choice(
                (
                    (chance.randrange(4), self._function(), (self.value(1),), {}),
                    (
                        *(chance.randrange(4), chance.choice(_METHODS), (self.value(1),), {}),
                        reference(chance.randrange(_VALUES)),
                    ),
                )
            ),
            "streams:pull": lambda: (chance.randrange(4), chance.randrange(4)),
            "streams:end": lambda: (chance.randrange(4),),
        }
        return fitting[short]()

    def _step(self) -> Any:
        function = self._function() if self.chance.random() < 0.6 else self._any_reference()
        return Made("torchweft.nn.owner:Step", (function, (self.value(1),), {}))

    def _function(self, names: tuple[str, ...] = ()) -> Any:
        if self.chance.random() < 0.5:
            return Named(self.chance.choice(names or tuple(_REGISTERED)).encode())
        return self.chance.choice((Named(self._name()), self._any_reference(), self.value(1)))

    def _state(self) -> Any:
        shapes = self.chance.choice((((2, 2), (2,)), ((2, 2), (3,)), ((), (2,))))
        made = {"layer.weight": torch.ones(shapes[0]), "layer.bias": torch.ones(shapes[1])}
        if self.chance.random() < 0.3:
            made["_extra_state"] = torch.ones(1)
        if self.chance.random() < 0.2:
            return Ordered(made, {"_metadata": self._dictionary(2)})
        return made

    def _changes(self) -> Any:
        names = ("lr", "fused", "params", "betas", "foreach", "capturable", "initial_lr", "eps")
        values = (0.1, True, None, (0.9, 0.99), [torch.ones(3)], torch.ones(()), torch.ones(5), "x")
        changes = {self.chance.choice(names): self.chance.choice(values)}
        return self.chance.choice(({}, {0: changes}, {0: {}}, {7: changes}))

    def _saved(self) -> Any:
        shape = self.chance.choice(((2, 2), (2,), (), (1,), (9,)))
        state = {
            "step": self.chance.choice((torch.tensor(1.0), 3, torch.ones(2), "x")),
            "exp_avg": torch.ones(shape),
            "exp_avg_sq": torch.ones(shape),
        }
        options = {0: {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0}}
        options[0].update(dict.fromkeys(("amsgrad", "maximize", "capturable"), False))
        options[0].update({"differentiable": False, "foreach": None, "fused": None})
        options[0].update(next(iter(self._changes().values()), {}))
        return Made("torchweft.optim.local:Saved", (options, {0: state, 1: dict(state)}))

    def _part(self) -> Any:
        which = self.chance.choice((_WEIGHT, _BIAS, _WEIGHT, _MATRIX, _TRAP, _HIDDEN))
        parameters = [self._reference(which)]
        options = next(iter(self._changes().values()), {})
        return Made("torchweft.optim.local:GroupPart", (0, options, [0], parameters))

    def _key(self) -> Any:
        workers = self.chance.choice(
            ((ME, SENDER), (SENDER, OTHER), (ME, SENDER, OTHER), (ME,), ())
        )
        kind = self.chance.choice(("barrier", "all_gather"))
        return Made("torchweft.rpc.collective:Key", (workers, kind, self._small() % 3))

    def _map_payload(self) -> bytes:
        encoder = FreeEncoder()
        function = self.chance.choice((self._function(), Named(_REGISTERED[0].encode())))
        try:
            return encoder.encode((function, [torch.ones(2)]))
        except Exception:
            return self.chance.randbytes(20)

    # Errors

    def _weft_error(self) -> Any:
        name = f"torchweft.errors:{self.chance.choice(('CallError', 'WorkerLost', 'NotAllowed'))}"
        kind = Named(name.encode()) if self.chance.random() < 0.8 else self._function()
        return Made("torchweft.errors:_rebuild_with_fields", (kind, "an error", self._fields()))

    def _fields(self) -> dict[str, Any]:
        return {"worker": "me"} if self.chance.random() < 0.7 else self._dictionary(1)

    def error(self) -> bytes:
        """Returns an error in the form of an answer or of a failed pass."""
        rows = [self._record() for _ in range(self.chance.choice((1, 1, 2, 3)))]
        encoder = FreeEncoder()
        try:
            return encoder.encode(("sender", "a traceback", rows))
        except Exception:
            return b""

    def _record(self) -> Any:
        chance = self.chance
        name = chance.choice(
            (
                ("builtins", chance.choice(_ERRORS)),
                ("torchweft.errors", chance.choice(("NotAllowed", "CallError.__init__", "x"))),
                tuple(self._name().decode("utf-8", "replace").partition(":")[::2]),
                None,
            )
        )
        blobs = [self._blob() for _ in range(chance.choice((0, 1, 2, 5)))]
        attributes = {
            chance.choice((*_METHODS, "name_from", "name", "__notes__", "obj")): self._blob()
            for _ in range(chance.choice((0, 1, 3)))
        }
        attributes.setdefault("name", ("this",))
        number = chance.choice((None, 0, 1, 2, -1, 99))
        bases = (("builtins", chance.choice(_ERRORS)), ("os", "system"))
        row: list[Any] = ["a type", "a text", bases, chance.random() < 0.9, name]
        row += [chance.choice((None, self._blob())), chance.choice((None, None, self._blob()))]
        members = chance.choice(((), (), (0,), (1, 0)))
        row += [tuple(blobs), attributes, members, number, number, chance.random() < 0.5]
        if chance.random() < 0.1:
            row[chance.randrange(len(row))] = self.value(1)
        return tuple(row)

    def _blob(self) -> Any:
        if self.chance.random() < 0.5:
            return (self.chance.choice(("text", 1, None, b"bytes", "this")),)
        encoder = FreeEncoder()
        try:
            payload = encoder.encode(self._without_references(self.value(2)))
        except Exception:
            return (1,)
        table, flat = describe(encoder.tensors) if encoder.tensors else (b"", [])
        return payload, self._lie(table), [bytes(as_memory(each)) for each in flat]

    def _without_references(self, value: Any) -> Any:
        return None if isinstance(value, _Reference) else value

    # Values

    def _payload(self, value: Any) -> tuple[bytes, list[Tensor]]:
        encoder = _Encoder(self._handed)
        try:
            payload = encoder.encode(value)
        except Exception:
            encoder = _Encoder(self._handed)
            payload = encoder.encode(None)
        choice = self.chance.random()
        if choice < 0.02:
            payload = b"\x80\x05cos\nsystem\n(X\x04\x00\x00\x00truetR."
        elif choice < 0.08:
            payload = _changed(self.chance, payload)
        return payload, encoder.tensors

    def value(self, depth: int) -> Any:
        """Returns any value of the closed format, or a value that only looks like it."""
        make = self.chance.choice(_LEAVES if depth <= 0 or self.chance.random() < 0.45 else _NODES)
        return make(self, depth - 1)

    def _scalar(self, depth: int) -> Any:
        return self.chance.choice((None, True, False, 0.5, math.nan, 2j, "text", b"bytes", ""))

    def _integer(self, depth: int) -> int:
        return self.chance.choice(_INTEGERS)

    def _word(self, depth: int) -> str:
        return self.chance.choice((*_METHODS, "cpu", "params", "fused", "layer.weight", "sender"))

    def _tensor(self, depth: int) -> Tensor:
        chance = self.chance
        shape = chance.choice(((), (1,), (2,), (2, 2), (3, 0), (2, 3, 1), (4,)))
        made = torch.ones(shape, dtype=chance.choice(_DTYPES))
        if chance.random() < 0.2 and made.is_floating_point():
            made.requires_grad_()
        elif chance.random() < 0.2:
            made = made.expand((chance.choice((2, 5)), *shape))
        elif chance.random() < 0.1 and made.is_floating_point():
            return torch.nn.Parameter(made)
        return made

    def _named(self, depth: int) -> Named:
        return Named(self._name())

    def _made(self, depth: int) -> Made:
        name = self.chance.choice(_GOOD_MAKERS if self.chance.random() < 0.7 else _MAKERS)
        if name.endswith("_sparse_coo") and self.chance.random() < 0.8:
            return Made(name, self._sparse())
        if name.endswith("_rebuild_with_fields") and self.chance.random() < 0.5:
            return self._weft_error()
        arguments: Any = tuple(self.value(depth) for _ in range(self.chance.choice((1, 2, 3, 4))))
        if name.endswith("_received"):
            arguments = (self._any_reference(), "cpu", True)
        return Made(name, arguments if self.chance.random() < 0.95 else self.value(depth))

    def _sparse(self) -> tuple[Any, ...]:
        chance = self.chance
        indices = chance.choice(([[0, 1]], [[0, 1 << 40]], [[-1, 0]], [[1, 1]], [[0]], [[0], [1]]))
        shape = chance.choice(((2,), (1,), (2, 2), (1 << 40,), (-1,), (0,)))
        return torch.tensor(indices), torch.ones(2), shape, chance.random() < 0.5

    def _attributed(self, depth: int) -> Attributed:
        value = self._tensor(0) if self.chance.random() < 0.7 else self.value(depth)
        name = self.chance.choice((*_METHODS, "note", "grad", "_backward_hooks", "detach"))
        return Attributed(value, {name: self.value(depth)})

    def _ordered(self, depth: int) -> Ordered:
        name = self.chance.choice((*_METHODS, "_metadata", "items", "copy", "get"))
        return Ordered({self._word(0): self.value(depth)}, {name: self.value(depth)})

    def _home(self, depth: int) -> Home:
        return Home(self._address(self.chance.randrange(_VALUES)))

    def _numbered(self, depth: int) -> Numbered:
        tag = self.chance.choice((tags.AGAIN, tags.TENSOR, tags.REFERENCE))
        return Numbered(tag, self.chance.choice((0, 1, 2, 9, 1 << 31)))

    def _torch(self, depth: int) -> Any:
        return self.chance.choice(
            (torch.float32, torch.sparse_coo, torch.device("cpu"), torch.Size([2]), torch.strided)
        )

    def _list(self, depth: int) -> list[Any]:
        made = [self.value(depth) for _ in range(self.chance.choice((0, 1, 2, 3)))]
        if self.chance.random() < 0.05:
            made.append(made)
        return made

    def _nest(self, depth: int) -> list[Any]:
        """Returns lists that each hold the one before more than once."""
        made = [self.value(depth)]
        for _ in range(self.chance.choice((1, 4, 20, 60))):
            made = [made] * self.chance.choice((1, 2, 3))
        return made

    def _keys(self, depth: int) -> Keys:
        """Returns a set or dict, most of whose keys have one hash."""
        step = self.chance.choice((1, 1 << 32, (1 << 61) - 1))
        keys: list[Any] = [step * number for number in range(self.chance.choice((3, 40, 150)))]
        if self.chance.random() < 0.3:
            keys = [(key, key) for key in keys]
        return Keys(self.chance.choice((tags.SET, tags.FROZENSET, tags.DICTIONARY)), keys)

    def _expanded(self, depth: int) -> Any:
        """Returns views of one element, of any number of elements."""
        size = self.chance.choice((5, 1 << 20, 1 << 28, 1 << 40))
        view = torch.ones(1, requires_grad=self.chance.random() < 0.5).expand(size)
        return [view, self.chance.choice((view, view.view(-1, 1), torch.ones(1)))]

    def _tuple(self, depth: int) -> tuple[Any, ...]:
        return tuple(self.value(depth) for _ in range(self.chance.choice((0, 1, 2, 3))))

    def _dictionary(self, depth: int) -> dict[Any, Any]:
        keys = [self.chance.choice((self._word(0), self._small())) for _ in range(2)]
        return {key: self.value(depth) for key in keys}

    def _any_reference(self, depth: int = 0) -> Any:
        return self._reference(self.chance.randrange(_VALUES))

    # Names and numbers

    def _name(self) -> bytes:
        choice = self.chance.random()
        if choice < 0.3:
            return self.chance.choice(_FORBIDDEN).encode()
        if choice < 0.5:
            return self.chance.choice(_REGISTERED).encode()
        if choice < 0.6:
            return self.chance.choice(_ENTRIES).encode()
        if choice < 0.9:
            module, paths = self.chance.choice(_modules())
            path = self.chance.choice(paths)
            if self.chance.random() < 0.3:
                path += "." + self.chance.choice(_METHODS)
            return f"{module}:{path}".encode("utf-8", "replace")
        return self.chance.randbytes(self.chance.choice((1, 8, 30)))

    def _reference(self, which: int) -> Any:
        if self.chance.random() < 0.2:
            return Home(self._address(which))
        id = ReferenceId(ME, ME, which)
        if self.chance.random() < 0.1:
            id = self._id()
        return _Reference(id, 1 + which * HANDED + self.chance.randrange(HANDED))

    def _id(self) -> ReferenceId:
        creator, owner = (self.chance.choice((ME, SENDER, OTHER, 7)) for _ in "12")
        return ReferenceId(creator, owner, self.chance.choice((0, 1, 4, 9, 1 << 20)))

    def _address(self, which: int) -> tuple[int, int, int]:
        return (ME, ME, which) if self.chance.random() < 0.9 else tuple(self._id())

    def _creation(self) -> int:
        return NO_CREATION if self.chance.random() < 0.8 else self._small()

    def _context(self) -> tuple[int, int]:
        if self.chance.random() < 0.5:
            return 0, 0
        return self._context_id(), self.chance.choice((0, self._message_id()))

    def _context_id(self) -> int:
        return scoped_id(self.chance.choice((SENDER, ME)), 1 + self._small() % 2)

    def _message_id(self) -> int:
        return scoped_id(self.chance.choice((SENDER, SENDER, ME, OTHER)), 1 + self._small() % 4)

    def _seconds(self) -> float:
        return self.chance.choice((0.003, 0.003, 0.003, 0.0, -1.0))

    def _number(self) -> int:
        return self.chance.choice((0, self.chance.randrange(1, 1 << 40)))

    def _small(self) -> int:
        return self.chance.choice((0, 1, 2, 3, 5, 9))


class _Reference:
    """Stands for a reference that the sender hands on to the worker."""

    def __init__(self, id: ReferenceId, token: int) -> None:
        self.id = id
        self.token = token


class _Encoder(FreeEncoder):
    """Encodes references as such, and lists them for the head of the message."""

    def __init__(self, handed: list[HandedReference]) -> None:
        super().__init__()
        self._handed = handed

    def _unfold(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, _Reference):
            self._handed.append(HandedReference(value.id, value.token))
            return (tags.NUMBER.pack(tags.REFERENCE, len(self._handed) - 1),)
        return super()._unfold(value)


@functools.lru_cache(maxsize=1)
def _modules() -> list[tuple[str, list[str]]]:
    """Returns the modules of the process, with the names in them."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.isascii()]
    return [(name, [*vars(module), "nothing"]) for name, module in modules]


def _changed(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 2, 4))):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _joined(parts: list[Any]) -> bytes:
    return b"".join(bytes(part) for part in parts)


_LEAVES: tuple[Callable[[Grammar, int], Any], ...] = (
    Grammar._scalar,
    Grammar._integer,
    Grammar._word,
    Grammar._tensor,
    Grammar._tensor,
    Grammar._named,
    Grammar._any_reference,
    Grammar._home,
    Grammar._torch,
)
_NODES: tuple[Callable[[Grammar, int], Any], ...] = (
    *(Grammar._list, Grammar._tuple, Grammar._dictionary, Grammar._made, Grammar._made),
    *(Grammar._attributed, Grammar._ordered, Grammar._numbered),
    *(Grammar._nest, Grammar._keys, Grammar._expanded),
)
_FRAMES: tuple[Any, ...] = (
    *[Grammar._call_message] * 22,
    *[Grammar._gradients] * 4,
    *[Grammar._backward] * 2,
    *(Grammar._reply, Grammar._references, Grammar._integers, Grammar._other),
)
