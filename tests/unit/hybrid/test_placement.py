"""Which tables of a module are found, which stay, and which share of rows is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.embedding import Copies
from torchweft.hybrid.model import replace_tables
from torchweft.hybrid.optimizer import Copied
from torchweft.hybrid.placement import find_tables, measure_shares
from torchweft.hybrid.plan import PlacementError

passes: Any = None
"""Nothing is looked up here."""


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"sparse": True, **options}
        self.words = nn.EmbeddingBag(10, 4, mode="sum", padding_idx=0)
        self.tower = nn.ModuleDict({"day": nn.Embedding(7, 4, **options)})
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, words: Tensor, days: Tensor) -> Tensor:
        side = self.tower["day"](days) + self.tower["day"](input=(days + 1) % 7)
        found: Tensor = self.head(self.drop(self.norm(self.words(words) + side)))
        return found


def test_a_table_whose_weight_has_another_use_stays() -> None:
    net = Net()
    net.head.weight = net.tower["day"].weight
    (found,) = find_tables(net)
    assert (found.config, found.kept) == (None, "shared with 'head'")
    with pytest.raises(PlacementError, match=r"'tower.day' cannot be placed: shared with 'head'"):
        find_tables(net, ["tower.day"])


def compute_weight(table: nn.Embedding) -> None:
    """Does what ``nn.utils.weight_norm`` and ``spectral_norm`` do."""
    table.raw = table.weight
    del table._parameters["weight"]
    table.weight = 2 * table.raw  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda table: table.weight.requires_grad_(False), "it is frozen"),
        (lambda table: table.bfloat16(), "rows on servers have no torch.bfloat16"),
        (compute_weight, "its weight is computed from other parameters"),
        (lambda table: table.weight.register_hook(torch.neg), "its weight has hooks"),
    ],
)
def test_the_reason_to_stay_is_told(change: Any, kept: str) -> None:
    net = Net()
    change(net.tower["day"])
    found = [each for each in find_tables(net) if each.kept]
    assert [each.kept for each in found] == [kept]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_a_table_that_depends_on_the_batch_of_one_trainer_is_refused(option: Any) -> None:
    with pytest.raises(PlacementError, match=f"'tower.day' has {next(iter(option))}") as raised:
        find_tables(Net(**option))
    assert raised.value.parameter == "tower.day"


def test_a_module_without_tables_is_told_what_to_do() -> None:
    message = r"sparse=True.*places=.*it has \['words', 'tower.day'\]"
    with pytest.raises(PlacementError, match=message):
        find_tables(Net(sparse=False))
    with pytest.raises(PlacementError, match="itself a table"):
        find_tables(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(PlacementError, match=r"did you mean 'tower\.day'"):
        find_tables(Net(), {"tower.days": Copies()})


def test_shares_are_counted_over_all_lookups_of_a_batch_without_padding() -> None:
    net = Net()
    state = {name: each.clone() for name, each in net.state_dict().items()}
    before = torch.get_rng_state()
    batches = [
        (torch.tensor([[0, 0, 2], [2, 3, 0]]), torch.tensor([1, 5])),  # of 10: 2, 3; of 7: 1 2 5 6
        (torch.tensor([[9, 9, 9], [9, 9, 9]]), torch.tensor([3, 3])),  # 9; 3 4
    ]
    shares = measure_shares(net, find_tables(net, ["words"]), batches)
    assert shares == {"words": pytest.approx(0.15), "tower/day": pytest.approx(3 / 7)}
    assert net.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, state[name]) for name, each in net.state_dict().items())
    assert not net.words._forward_pre_hooks
    with pytest.raises(PlacementError, match="no batch"):
        measure_shares(net, find_tables(net), [])


def test_what_replaces_a_table_has_its_settings_and_its_hooks() -> None:
    net = Net()
    table, seen = net.tower["day"], []
    handle = table.register_forward_pre_hook(lambda _, args: seen.append(args))
    table.register_forward_hook(lambda *_: torch.zeros(2))
    replace_tables(net, find_tables(net), passes)
    remote: Any = net.tower["day"]
    assert (remote.num_embeddings, remote.embedding_dim, remote.padding_idx) == (7, 4, None)
    with pytest.raises(AttributeError, match=r"the weight of 'tower/day' is on servers.*Copies"):
        _ = remote.weight
    remote.forward = lambda ids: ids + 1  # type: ignore[method-assign]
    assert torch.equal(remote(1), torch.zeros(2))
    handle.remove()
    remote(2)
    assert seen == [(1,)]


def test_a_copy_notes_the_rows_that_have_had_a_gradient() -> None:
    net = Net()
    copied = Copied(find_tables(net)[0])
    table = net.tower["day"]
    table(torch.tensor([1, 2]))
    with torch.no_grad():
        table(torch.tensor([3]))
    assert not copied.used.any()
    table(torch.tensor([4, 6])).sum().backward()
    assert copied.used.nonzero().view(-1).tolist() == [4, 6]
    assert not table.weight.grad.is_sparse
