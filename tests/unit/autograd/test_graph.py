"""A pass over several workers leaves the gradients of a single process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gradient_functions import Broken
from tests.unit.autograd import programs
from tests.unit.autograd.cluster import (
    Cluster,
    Program,
    World,
    assert_equal_gradients,
    check,
    expected_gradients,
)
from weft.autograd import local_engine
from weft.autograd.contexts import Context
from weft.autograd.graph import LocalPass
from weft.errors import AutogradError, ProtocolError
from weft.protocol import backward as protocol

every_mode = pytest.mark.parametrize("fast", [False, True], ids=["smart", "fast"])


@every_mode
@pytest.mark.parametrize("program", programs.ALL, ids=lambda program: program.__name__)
def test_gradients_equal_those_of_a_single_process(program: Program, fast: bool) -> None:
    for seed in range(3):
        check(program, seed, fast=fast)


@every_mode
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_programs_equal_a_single_process(start: int, fast: bool) -> None:
    for seed in range(start, start + 50):
        check(programs.random_program(seed), seed, fast=fast)


@pytest.mark.parametrize("program", programs.ALL, ids=lambda program: program.__name__)
def test_two_passes_on_a_retained_graph_add_up(program: Program) -> None:
    check(program, passes=2)


def test_second_pass_on_a_freed_graph_fails() -> None:
    cluster = Cluster()
    roots = programs.chain(cluster)
    cluster.backward(roots)
    with pytest.raises(AutogradError, match="second time"):
        cluster.backward(roots)


def test_pass_led_by_any_worker() -> None:
    cluster = Cluster()

    def program(world: World) -> list[Tensor]:
        sent = world.send(0, 2, *programs.chain(world))
        return [sent[0] * 2]

    cluster.backward(program(cluster), driver=2)
    assert_equal_gradients(cluster.gradients(), expected_gradients(program))


def test_unused_results_cost_no_gradient_message() -> None:
    cluster = check(programs.dead_branches)
    assert cluster.gradient_messages == 2


def test_contexts_on_shared_parameters_do_not_mix() -> None:
    first, second = Cluster(seed=1), Cluster(seed=2)
    second.parameters = first.parameters
    first_roots, second_roots = programs.decoder(first), programs.fan_out(second)
    second.backward(second_roots)
    first.backward(first_roots)
    assert_equal_gradients(first.gradients(), expected_gradients(programs.decoder))
    assert_equal_gradients(second.gradients(), expected_gradients(programs.fan_out))
    assert all(parameter.grad is None for parameter in first.parameters.values())


def test_sparse_gradients_stay_sparse() -> None:
    cluster = check(programs.embedding)
    table = cluster.parameters[1, "table"]
    assert cluster.contexts[1].get_gradients()[table].is_sparse


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_cycles_of_any_length(steps: int) -> None:
    check(lambda world: programs.decoder(world, steps))


def test_hooks_at_a_cut_see_the_whole_gradient_once() -> None:
    seen: list[Tensor] = []
    states: list[Tensor] = []

    def program(world: World) -> list[Tensor]:
        state = world.parameter(1, "s", 3) * 2
        state.register_hook(seen.append)
        state.retain_grad()
        states.append(state)
        output = world.send(1, 0, state * 2)[0]
        back = world.send(0, 1, output * 3)[0]
        return [world.send(1, 0, state * back)[0].sum()]

    check(program)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(states[0].grad, states[1].grad)


def test_node_hooks_and_module_hooks_before_a_cut_take_effect() -> None:
    def program(world: World) -> list[Tensor]:
        # The same linear layer in both worlds, made of the world's parameter.
        layer = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
        del layer.weight
        layer.weight = world.parameter(1, "w", 3, 3)
        layer.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 3,))
        state, fed = world.parameter(1, "s", 3) * 1, world.parameter(0, "x", 3)
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(3):
            state = layer(state + world.send(0, 1, fed)[0])
            state.grad_fn.register_prehook(lambda outer: (outer[0] * 2,))  # type: ignore[union-attr]
            fed = world.send(1, 0, state)[0]
            total = total + fed.sum()
        return [total]

    check(program)


@every_mode
def test_error_in_a_custom_backward_names_worker_and_operation(fast: bool) -> None:
    cluster = Cluster()
    received = cluster.send(0, 2, cluster.parameter(0, "x", 3) * 2)[0]
    result = cluster.send(2, 0, Broken.apply(received))[0]
    with pytest.raises(AutogradError, match="no slope here") as caught:
        cluster.backward([result.sum()], fast=fast)
    assert (caught.value.worker, caught.value.operation) == ("worker2", "Broken.backward")
    assert isinstance(caught.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("kind", [protocol.Discover, protocol.Reached, protocol.Gradients])
def test_lost_worker_ends_the_pass(kind: type) -> None:
    def lose(driver: protocol.Driver, message: protocol.Message) -> list[protocol.Action]:
        return driver.worker_lost(1, "end of file") if isinstance(message, kind) else []

    cluster = Cluster()
    roots = programs.nested(cluster)
    with pytest.raises(AutogradError, match="end of file") as caught:
        cluster.backward(roots, on_message=lose)
    assert caught.value.worker == "worker1"


def test_roots_are_checked() -> None:
    local = LocalPass(Context(1, 0))
    with pytest.raises(AutogradError, match="at least one"):
        local.walk_roots([])
    with pytest.raises(AutogradError, match="does not require grad"):
        local.walk_roots([torch.ones(())])
    with pytest.raises(AutogradError, match="scalars"):
        local.walk_roots([torch.ones(3, requires_grad=True)])
    with pytest.raises(AutogradError, match="not a tensor"):
        local.walk_roots([3.0])  # type: ignore[list-item]


def local_pass_with_two_sends() -> tuple[LocalPass, Context, Tensor, list[int]]:
    context = Context(1, 0)
    weight = torch.nn.Parameter(torch.ones(2))
    shared = weight * 2
    message_ids = [context.record_send([shared * factor], 1) for factor in (1, 10)]
    local = LocalPass(context)
    local.walk_sends(message_ids)
    return local, context, weight, message_ids


def test_shared_nodes_wait_for_all_their_sends() -> None:
    local, context, weight, (first, second) = local_pass_with_two_sends()
    local.gradients_arrived(second, [torch.ones(2)])
    assert local.run() == []
    assert not local.is_done
    assert context.get_gradients() == {}
    local.gradients_arrived(first, [torch.ones(2)])
    assert local.is_done
    assert context.get_gradients()[weight].tolist() == [22.0, 22.0]


def test_gradients_that_are_not_due_are_refused() -> None:
    local, context, _, (first, second) = local_pass_with_two_sends()
    local.run()
    with pytest.raises(ProtocolError, match="1 tensors"):
        local.gradients_arrived(first, [])
    misshapen = LocalPass(context)
    misshapen.walk_sends([first])
    misshapen.run()
    with pytest.raises(ProtocolError, match="shape"):
        misshapen.gradients_arrived(first, [torch.ones(1)])
    other = LocalPass(context)
    other.run()
    with pytest.raises(ProtocolError, match="without being due"):
        other.gradients_arrived(second, [torch.ones(2)])
    with pytest.raises(ProtocolError, match="not among those sent"):
        other.walk_sends([12345])


def test_a_closed_pass_runs_nothing() -> None:
    local, context, _, (first, second) = local_pass_with_two_sends()
    local.run()
    local.close()
    for message_id in (first, second):
        assert local.gradients_arrived(message_id, [torch.ones(2)]) == []
    assert context.get_gradients() == {}


def test_gradients_that_arrive_while_another_thread_runs_are_left_to_it() -> None:
    context = Context(1, 0)
    is_inside, may_go_on = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> None:
        is_inside.set()
        assert may_go_on.wait(20)

    received = context.record_receive(99, 1, [torch.ones(2), torch.ones(2)], [1, 0])[0]
    slow = received * 2
    slow.register_hook(wait)
    quick = torch.nn.Parameter(torch.ones(2))
    ids = [context.record_send([slow], 1), context.record_send([quick * 3], 1)]
    local = LocalPass(context)
    local.walk_sends(ids)
    local.run()
    outgoing: list[object] = []
    thread = threading.Thread(
        target=lambda: outgoing.extend(local.gradients_arrived(ids[0], [torch.ones(2)]))
    )
    thread.start()
    assert is_inside.wait(20)
    assert local.gradients_arrived(ids[1], [torch.ones(2)]) == []
    assert not local.is_done
    may_go_on.set()
    thread.join(20)
    assert local.is_done
    assert len(outgoing) == 1
    assert context.get_gradients()[quick].tolist() == [3.0, 3.0]


def test_another_torch_without_the_inner_engine_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine, "_engine", None)
    check(programs.hooked_decoder)


def test_fast_answers_messages_that_arrive_during_the_pass() -> None:
    context = Context(7, 0)
    local = LocalPass(context)
    late: list[Any] = []
    assert local.run(fast=True, answer_late=late.append) == []
    context.record_receive(99, 1, [torch.ones(2), torch.ones(2)], [1, 1])
    assert late == [(1, 99, [None, None])]


def test_fast_passes_over_answers_to_messages_sent_during_the_pass() -> None:
    context = Context(7, 0)
    local = LocalPass(context)
    local.run(fast=True)
    message_id = context.record_send([torch.ones(2, requires_grad=True)], 1)
    assert local.gradients_arrived(message_id, [None]) == []
    with pytest.raises(ProtocolError, match="without being due"):
        local.gradients_arrived(message_id, [torch.ones(2)])
