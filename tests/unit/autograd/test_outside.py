"""Tests records outside of contexts: they end by themselves, and any pass may use them."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.thorough import CHECKED, lots, spread
from tests.unit.autograd import awkward_programs, programs
from tests.unit.autograd.cluster import (
    Cluster,
    Program,
    assert_equal_gradients,
    expected_gradients,
)
from torchweft.autograd.contexts import Context, make_placeholders
from torchweft.autograd.local_pass import LocalPass
from torchweft.autograd.outside import OutsideRecords


def received(records: OutsideRecords, message_id: int, *tensors: Tensor) -> list[Tensor]:
    nodes, placeholders = make_placeholders(list(tensors))
    records.place_received(message_id, 1, nodes)
    return placeholders


class Outside(Cluster):
    """Workers some or all of whose messages belong to no context."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(seed=seed)
        self.share = share
        for context in self.contexts:
            self.outside.append(OutsideRecords(context.worker, context._counter))

    def send(self, source: int, destination: int, *tensors: Tensor) -> list[Tensor]:
        is_recorded = any(each.is_leaf and each.requires_grad for each in tensors)
        if is_recorded or self.random.random() >= self.share:
            return super().send(source, destination, *tensors)
        computed = [each for each in tensors if each.requires_grad]
        values = [each.detach().clone() for each in tensors]
        if not computed:
            return values
        message_id = self.outside[source].record_send(computed, destination)
        places = [place for place, each in enumerate(tensors) if each.requires_grad]
        nodes, placeholders = make_placeholders([values[place] for place in places])
        self.outside[destination].place_received(message_id, source, nodes)
        for place, placeholder in zip(places, placeholders, strict=True):
            values[place] = placeholder
        return values

    def release(self) -> None:
        """Tells senders which receives ended, and repeats while that ends further receives."""
        while any(ended := [each.take_ended() for each in self.outside]):
            for worker, by_sender in enumerate(ended):
                for sender, message_ids in by_sender.items():
                    self.outside[sender].drop_sends(message_ids, worker)

    def remains(self) -> bool:
        return any(each.count() != (0, 0) for each in self.outside)


def check_and_release(program: Program, seed: int, share: float) -> None:
    cluster = Outside(seed, share)
    roots: Sequence[Tensor] = list(program(cluster))
    cluster.backward(roots)
    assert_equal_gradients(cluster.gradients(), expected_gradients(program))
    for context in cluster.contexts:
        context.clear()
    del roots
    cluster.release()
    if cluster.remains():  # Python functions in a graph may be part of reference cycles.
        gc.collect()
        cluster.release()
    assert not cluster.remains()


@pytest.mark.parametrize(
    ("program", "share"),
    spread(programs.ALL + awkward_programs.ALL, [0.5, 1.0], all_from=CHECKED),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_gradients_equal_those_of_a_single_process(program: Program, share: float) -> None:
    check_and_release(program, 1, share)


@pytest.mark.parametrize("lot", lots(60, 20), ids=str)
def test_random_programs_equal_a_single_process(lot: range) -> None:
    for seed in lot:
        check_and_release(programs.random_program(seed), seed, 0.5 + seed % 2 / 2)


def test_a_receive_ends_with_the_last_graph_that_leads_to_it() -> None:
    records = OutsideRecords(0)
    told: list[int] = []
    records.on_ended = lambda: told.append(1)
    first, second = received(records, 7, torch.ones(2), torch.ones(3))
    loss = (first * 2).sum()
    del first, second
    assert records.count() == (0, 1)
    assert records.take_ended() == {}
    del loss
    assert told == [1]
    assert records.take_ended() == {1: [7]}
    assert records.count() == (0, 0)


def test_a_send_ends_when_its_receiver_says_so_or_is_lost() -> None:
    records = OutsideRecords(0)
    tensor = torch.ones(2, requires_grad=True) * 2
    ids = [records.record_send([tensor], to_worker) for to_worker in (1, 2, 2, 3)]
    assert len(set(ids)) == 4
    records.drop_sends(ids[:2], 1)  # Worker 1 did not receive the second send.
    assert [each.message_id for each in records.sends()] == ids[1:]
    records.worker_lost(2)
    assert [each.message_id for each in records.sends()] == ids[3:]
    records.take_back(ids[3])
    records.take_back(ids[3])
    assert records.sends() == []
    assert records.send(ids[3]) is None


def test_a_pass_lets_go_of_the_graphs_of_unreachable_messages() -> None:
    records, context = OutsideRecords(0), Context(9, 0)
    (first,), (second,) = (received(records, each, torch.ones(2)) for each in (101, 102))
    leaf = torch.ones(2, requires_grad=True)
    alone = records.record_send([first * leaf], 1)
    shared = second * leaf
    pair = [records.record_send([shared * each], 1) for each in (2, 3)]
    used = records.record_send([leaf * 4], 2)
    del first, second, shared
    local = LocalPass(context, outside=records)
    local.announce([used])
    local.work()
    records.drop_sends([alone, pair[0]], 1)
    assert records.take_ended() == {}
    local.forget([alone, pair[0]])
    assert records.take_ended() == {1: [101]}
    assert local.may_keep(pair)  # The other message of the pair leads to all of its graph.
    records.drop_sends(pair, 1)
    local.forget(pair)
    assert records.take_ended() == {1: [102]}
    assert not local.may_keep([alone, *pair])
    local.arrive(used, [torch.ones(2)])
    local.work()
    assert context.get_gradients()[leaf].tolist() == [4.0, 4.0]


def test_a_pass_keeps_the_graphs_of_gradients_that_have_come() -> None:
    records, context = OutsideRecords(0), Context(9, 0)
    (placeholder,) = received(records, 101, torch.ones(2))
    shared = placeholder * 5
    pair = [records.record_send([shared * each], 1) for each in (2, 3)]
    del placeholder, shared
    local = LocalPass(context, outside=records)
    local.arrive(pair[0], [torch.ones(2)])
    assert local.work()[0] == []
    # The receiver has sent all that it will send: it never used the other message.
    records.drop_sends(pair, 1)
    local.forget(pair)
    local.settle()
    ((worker, message_id, (gradient,)),) = local.work()[0]
    assert (worker, message_id) == (1, 101)
    assert isinstance(gradient, Tensor)
    assert gradient.tolist() == [10.0, 10.0]
    local.forget(pair)
    del gradient
    assert records.take_ended() == {1: [101]}
