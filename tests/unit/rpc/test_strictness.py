"""Weft's own entry points on a strict worker, in a call from another worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.free_encoder import Attributed, Made, Named, pack_freely
from tests.fuzz.strict import program
from tests.fuzz.strict.world import OTHER, World
from torchweft.engine.codec.objects import pack_plain
from torchweft.engine.codec.tensors import as_memory, describe, encode_tensors
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import (
    NAMED,
    NO_CREATION,
    TABLES,
    Kind,
    encode_call,
    encode_tables,
)
from torchweft.engine.worker.calls import current_call
from torchweft.errors import (
    ArgumentTypeError,
    CallError,
    NotAllowed,
    ProtocolError,
    SerializationError,
)
from torchweft.mapreduce import shared
from torchweft.nn import owner
from torchweft.nn.owner import Step
from torchweft.optim import clipping, local
from torchweft.optim.local import GroupPart, Saved
from torchweft.rpc import RRef, collective
from torchweft.rpc.calls import CALL_METHOD
from torchweft.rpc.collective import Key

ROWS = torch.ones(1, 2)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def served(world: World) -> Iterator[World]:
    """A strict worker that serves a call from another worker."""
    token: Any = current_call.set(SimpleNamespace(peer=world.sender))  # type: ignore[arg-type]
    yield world
    current_call.reset(token)


def run(module: Any, steps: tuple[Step, ...], *args: Any) -> Any:
    """Calls a module of this worker, as a call of another worker does."""
    address = module.id if isinstance(module, RRef) else (module, 0, 0)
    waiting = owner.run(*address, None, "cpu", steps, *args)
    return waiting.then(waiting.owned.value)[1]


def refusals(calls: dict[str, Callable[[], object]]) -> dict[str, type]:
    raised = {}
    for name, call in calls.items():
        with pytest.raises(Exception) as caught:
            call()
        raised[name] = type(caught.value)
    return raised


def test_modules_are_made_of_what_is_registered(served: World) -> None:
    made = owner.create(program.Net, (), {}, "cpu")
    assert run(made, (Step(torch.mul, (2,), {}),), ROWS).shape == (1, 2)
    assert len(owner.parameters(made, True)) == 2
    assert set(owner.state(made, "a.")) == {"a.layer.weight", "a.layer.bias"}
    assert owner.load_state(made, {"layer.bias": torch.ones(2)})[0] == ["layer.weight"]
    raised = refusals(
        {
            "class": lambda: owner.create(nn.Linear, (1, 1), {}, "cpu"),
            "hidden class": lambda: owner.create(program.Hidden, (), {}, "cpu"),
            "device": lambda: owner.create(program.Net, (), {}, "meta"),
            "step": lambda: run(made, (Step(torch.add, (1,), {}),), ROWS),
            "function": lambda: owner.apply(made, program.unregistered),  # type: ignore[arg-type]
        }
    )
    assert set(raised.values()) == {NotAllowed}


def test_other_modules_and_other_objects_are_left_alone(served: World) -> None:
    hidden = RRef(program.Hidden())
    calls: dict[str, Callable[[Any], object]] = {
        "run": lambda it: run(it, (), ROWS),
        "step": lambda it: run(owner.create(program.Net, (), {}, "cpu"), (Step(it, (), {}),), ROWS),
        "parameters": lambda it: owner.parameters(it, True),
        "duplicate": owner.duplicate,
        "training": lambda it: owner.set_training(it, True),
        "freeze": lambda it: owner.set_requires_grad(it, False),
        "convert": lambda it: owner.convert(it, program.identity, True),
        "apply": lambda it: owner.apply(it, program.identity),
        "load": lambda it: owner.load_state(it, {}),
        "state": lambda it: owner.state(it, ""),
    }
    of_hidden = refusals({name: lambda c=call: c(hidden) for name, call in calls.items()})  # type: ignore[misc]
    assert set(of_hidden.values()) == {NotAllowed}
    trap = RRef(program.Trap())
    of_trap = refusals({name: lambda c=call: c(trap) for name, call in calls.items()})  # type: ignore[misc]
    assert set(of_trap.values()) == {NotAllowed, ArgumentTypeError}
    of_nothing = refusals({name: lambda c=call: c("text") for name, call in calls.items()})  # type: ignore[misc]
    assert set(of_nothing.values()) <= {NotAllowed, ArgumentTypeError}
    assert program.sung == []


def part(*values: Any, **options: Any) -> list[GroupPart]:
    return [GroupPart(0, options, list(range(len(values))), [RRef(value) for value in values])]


def test_optimizers_are_registered_classes_over_parameters(served: World) -> None:
    weight = nn.Parameter(torch.ones(2))
    placed = local.place(None, torch.optim.Adam, (), {"lr": 0.5}, part(weight, betas=(0.9, 0.9)))
    address: Any = tuple(placed.optimizer.id)
    local.change(address, {0: {"lr": torch.tensor(0.25), "foreach": None}})
    assert local.save(address, {}).options[0]["lr"] == 0.25
    raised = refusals(
        {
            "class": lambda: local.place(None, torch.optim.Adagrad, (), {}, part(weight)),
            "tensor": lambda: local.place(None, torch.optim.SGD, (), {}, part(torch.ones(2))),
            "object": lambda: local.place(None, torch.optim.SGD, (), {}, part(program.Trap())),
            "fused": lambda: local.place(None, torch.optim.SGD, (), {"fused": True}, part(weight)),
            "fused group": lambda: local.place(
                None, torch.optim.SGD, (), {}, part(weight, fused=True)
            ),
            "fused later": lambda: local.change(address, {0: {"fused": True}}),
            "parameters": lambda: local.change(address, {0: {"params": [ROWS]}}),
            "large": lambda: local.load(address, saved(torch.ones(3))),
            "of others": lambda: local.load(address, Saved({0: {}}, {7: {}})),
        }
    )
    assert set(raised.values()) == {NotAllowed}
    raised = refusals(
        {
            "function": lambda: local.place(None, program.identity, (), {}, part(weight)),  # type: ignore[arg-type]
            "value": lambda: local.change(address, {0: {"lr": ROWS}}),
            "name": lambda: local.change(address, {0: {1: 2}}),  # type: ignore[dict-item]
            "changes": lambda: local.save(address, [1]),  # type: ignore[arg-type]
            "parts": lambda: local.place(None, torch.optim.SGD, (), {}, [1]),  # type: ignore[list-item]
            "saved": lambda: local.load(address, {}),  # type: ignore[arg-type]
            "state": lambda: local.load(address, Saved({}, {0: [1]})),
            "optimizer": lambda: local.place(RRef(3), torch.optim.SGD, (), {}, part(weight)),  # type: ignore[arg-type]
        }
    )
    assert all(issubclass(kind, (TypeError, ValueError)) for kind in raised.values()), raised


def saved(average: torch.Tensor) -> Saved:
    return Saved({0: {"lr": 0.1}}, {0: {"exp_avg": average}})


def test_a_fused_optimizer_of_the_worker_loads_no_state_of_others(world: World) -> None:
    weight = nn.Parameter(torch.ones(2))
    placed = local.place(None, torch.optim.Adam, (), {"fused": True}, part(weight))
    token: Any = current_call.set(SimpleNamespace(peer=world.sender))  # type: ignore[arg-type]
    with pytest.raises(NotAllowed, match="fused"):
        local.load(tuple(placed.optimizer.id), saved(torch.ones(2)))  # type: ignore[arg-type]
    current_call.reset(token)


def test_clipping_asks_no_value_for_its_hash(served: World) -> None:
    context_id = served.worker.contexts.get_or_create(served.worker.contexts.new_id()).id
    addresses: Any = [(0, tuple(RRef(program.Trap()).id)), (1, served.addresses[4])]
    assert clipping.norms([context_id], addresses, 2.0)[0] == []
    assert program.sung == []
    with pytest.raises(ArgumentTypeError):
        clipping.scale(context_id, addresses, torch.ones(2))
    with pytest.raises(ArgumentTypeError):
        clipping.scale(context_id, addresses, 0.5)  # type: ignore[arg-type]


def test_maps_run_what_is_registered(served: World) -> None:
    for function in (program.add, torch.sub):
        packed = pack_plain((function, [torch.ones(1)]), main_by_name=True)
        made = shared.make(packed.payload, packed.tensors, 1)
        try:
            _, run_part = made.call((1, 2), {}, (0, 1), None)
            assert run_part() == 3
            assert function is program.add
        except NotAllowed:
            assert function is torch.sub
    for wrong in (("text", [], 1), (b"", ["text"], 1), (b"", [], "one")):
        with pytest.raises(ArgumentTypeError):
            shared.make(*wrong)  # type: ignore[arg-type]


def test_a_worker_comes_to_a_gathering_by_itself_and_hears_of_it_from_its_leader(
    served: World,
) -> None:
    key = Key((0, 1), "barrier", 0)
    collective.bring(key, None)
    collective.bring(Key((0, 1, 2), "barrier", 0), None, CallError("no"))
    raised = refusals(
        {
            "leader": lambda: collective.bring(Key((1, 2), "barrier", 0), None),
            "not of it": lambda: collective.bring(Key((0, 2), "barrier", 0), None),
            "unknown": lambda: collective.bring(Key((0, 1, 9), "barrier", 0), None),
            "order": lambda: collective.bring(Key((1, 0), "barrier", 0), None),
            "empty": lambda: collective.bring(Key((), "barrier", 0), None),
            "told by no leader": lambda: collective.tell(key, {}),
            "failed by no leader": lambda: collective.tell(key, {}, CallError("no")),
            "not me": lambda: collective.tell(Key((1, OTHER), "barrier", 0), {}),
        }
    )
    assert set(raised.values()) == {NotAllowed}
    for wrong in (("key", None), ((0, 1), None), (key, None, "no error")):
        with pytest.raises(ArgumentTypeError):
            collective.bring(*wrong)  # type: ignore[arg-type]


# Whole calls


def answer(
    world: World, content: Any, name: bytes = b"", flags: int = 0, *, by_tables: bool = False
) -> BaseException | None:
    """Returns the error that answers a call with content that Weft did not encode."""
    packed = pack_freely(content)
    front = encode_call(5.0, NO_CREATION, 0, 0, name, b"", (), packed.payload)
    errors: list[BaseException] = []
    world.worker.reply_error = lambda peer, number, error: errors.append(error)  # type: ignore[method-assign]
    if by_tables:
        table, flat = describe(packed.tensors)
        buffers = [memoryview(bytearray(as_memory(each))) for each in flat]
        control = front + encode_tables(table, b"")
        frame = Frame(Kind.CALL, flags | TABLES, 7, control, buffers)
    else:
        inlined = encode_tensors(packed.tensors)
        assert inlined is not None
        frame = Frame(Kind.CALL, flags, 7, front + inlined[0], ())
    assert world.receive(frame) is None
    return errors[0] if errors else None


@pytest.mark.parametrize("by_tables", [False, True])
def test_a_tensor_is_not_taken_apart_into_arguments(world: World, by_tables: bool) -> None:
    many = torch.ones(()).expand(1 << 18, 2)  # 4 bytes
    identity = f"{program.__name__}:identity".encode()
    fetch = b"torchweft.rpc.serving:fetch"
    method = b"torchweft.rpc.serving:call_method"
    for content, name, flags in (
        (many, identity, 0),
        (many, identity, NAMED),
        (Attributed(many, {"note": 1}), identity, 0),
        ([many, {}], identity, 0),
        (many, b"", 0),
        ((many, 0, 5, None), fetch, 0),
        (many, method, 0),
    ):
        error = answer(world, content, name, flags, by_tables=by_tables)
        assert isinstance(error, ArgumentTypeError), (name, error)
    error = answer(world, (many.expand(1 << 22, 1 << 18, 2),), identity, by_tables=by_tables)
    assert isinstance(error, SerializationError)


def test_content_that_is_no_arguments_is_answered_with_an_error(world: World) -> None:
    identity = f"{program.__name__}:identity".encode()
    for content in (None, 3, [], [3], "text", {"a": 1, "b": 2}):
        for flags in (0, NAMED):
            error = answer(world, content, identity, flags)
            assert isinstance(error, ArgumentTypeError), content
    for content in ((), (1,), ("a",), (1, ("a", "b")), (1, 2, ("a", "a")), (1, ["a"])):
        assert isinstance(answer(world, content, identity, NAMED), ProtocolError), content
    for content in ((1, (2,)), (1, ({},))):
        assert isinstance(answer(world, content, identity, NAMED), TypeError), content


def test_tensors_that_are_malformed_answer_the_call_or_end_the_connection(world: World) -> None:
    identity = f"{program.__name__}:identity".encode()
    front = encode_call(5.0, NO_CREATION, 0, 0, identity, b"", (), b"")
    for control, flags in ((front + b"\xff" * 9, 0), (front, TABLES)):
        errors: list[BaseException] = []
        world.worker.reply_error = lambda peer, number, error: errors.append(error)  # type: ignore[method-assign]  # noqa: B023
        refusal = world.receive(Frame(Kind.CALL, flags, 7, control, ()))
        assert isinstance(refusal or errors[0], ProtocolError)


def test_arguments_of_methods_and_modules_are_counted_from_the_programs_first(world: World) -> None:
    lock = threading.Lock()
    method = (1, 0, 7, None, "name")
    for function, args, kwargs, place in (
        (CALL_METHOD, (*method, 1, [lock]), {}, "args[1][0]"),
        (CALL_METHOD, (*method, lock), {"key": 1}, "args[0]"),
        (CALL_METHOD, method, {"name": lock}, "kwargs['name']"),
        (owner.run, (1, 0, 7, None, "cpu", None, lock), {}, "args[0]"),
        (owner.run, (1, 0, 7, None, "cpu", None, 1, 2, lock), {}, "args[2]"),
        (
            owner.run,
            (1, 0, 7, None, "cpu", (Step(len, (lock,), {}),)),
            {},
            "kwargs['steps'][0].args[0]",
        ),
    ):
        for peer in (world.sender, world.agent.me):
            with pytest.raises(SerializationError) as caught:
                world.worker.encoder.request(peer, function, args, kwargs, 1.0)
            assert str(caught.value).startswith(f"{place} "), (function, peer)


def test_a_function_in_a_call_is_registered(world: World) -> None:
    remote = Made("torchweft.nn.remote_module:_received", (None, "cpu", True))
    assert isinstance(answer(world, (Named(b"os:getpid"),)), NotAllowed)
    assert answer(world, (Named(f"{program.__name__}:identity".encode()), 1)) is None
    assert isinstance(answer(world, ()), ProtocolError)
    for function in (remote, 3, "text", [], Named(b"builtins:KeyError")):
        error = answer(world, (function,))
        assert isinstance(error, (NotAllowed, CallError, TypeError)), error
