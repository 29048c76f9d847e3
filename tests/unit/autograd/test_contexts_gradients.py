"""Tests sums of gradients, and who owns their memory."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from torchweft.autograd.contexts import Gradients


def sparse(*indices: int) -> Tensor:
    """Returns a sparse gradient of three rows, with ones at ``indices``."""
    return torch.zeros(3).index_fill(0, torch.tensor(indices), 1.0).to_sparse()


def test_memory_in_use_elsewhere_is_copied() -> None:
    sums = Gradients()
    first, second, third, fourth = (torch.ones(2) for _ in range(4))
    twice, borrowed, own = torch.ones(2), torch.ones(2), torch.ones(2)
    viewed = torch.ones(4)
    pairs = [(first, twice), (second, twice), (third, borrowed), (fourth, viewed[:2])]
    sums.add_all(pairs, borrowed=[borrowed])
    sums.add_all([(viewed, own)], ())
    stored = sums.snapshot()
    pointers = {gradient.data_ptr() for gradient in stored.values()}
    assert len(pointers) == 5
    assert not pointers & {borrowed.data_ptr(), viewed.data_ptr()}
    assert own.data_ptr() in pointers


def embedding_gradient(rows: Tensor, values: Tensor) -> Tensor:
    """Returns a sparse gradient as torch makes it: its indices share the input's memory."""
    return torch.sparse_coo_tensor(rows.reshape(1, -1), values, (5, 2), check_invariants=True)


def test_a_sparse_gradient_gets_memory_of_its_own() -> None:
    sums = Gradients()
    first, second, third = torch.ones(1), torch.ones(1), torch.ones(1)
    rows, kept = torch.tensor([3, 1]), torch.ones(2, 2)
    gradient = embedding_gradient(rows, torch.ones(2, 2))
    sums.add_all(
        [
            (first, gradient),
            (second, embedding_gradient(rows, kept)),
            (third, embedding_gradient(rows, torch.ones(1, 2).expand(2, 2))),
        ],
        borrowed=(),
    )
    expected = gradient.to_dense()
    rows.zero_()
    kept.zero_()
    for found in sums.snapshot().values():
        assert torch.equal(found.to_dense(), expected)
        found._values().mul_(2)
        assert torch.equal(found.to_dense(), expected * 2)


def test_what_was_handed_out_does_not_change() -> None:
    sums, weight = Gradients(), torch.ones(2)
    handed_out = []
    for _ in range(3):
        sums.add_all([(weight, torch.ones(2))], ())
        handed_out.append(sums.snapshot()[weight])
    assert [gradient[0].item() for gradient in handed_out] == [1.0, 2.0, 3.0]


def test_threads_add_up() -> None:
    sums, weight = Gradients(), torch.zeros(1)
    threads = [
        threading.Thread(
            target=lambda: [sums.add_all([(weight, torch.ones(1))], ()) for _ in range(200)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums.snapshot()[weight].item() == 800
    sums.clear()
    assert sums.snapshot() == {}
