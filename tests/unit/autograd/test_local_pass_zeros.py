"""Tests zeros in place of missing gradients, as ``torch.distributed.autograd`` sends them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.autograd import awkward_programs
from tests.unit.autograd.cluster import Cluster
from torchweft.autograd.local_pass import enable_zeros


@pytest.fixture(autouse=True)
def _zeros() -> Iterator[None]:
    enable_zeros()
    yield
    enable_zeros(False)


def test_the_remote_part_of_a_result_without_gradient_runs() -> None:
    cluster = Cluster()
    cluster.backward(awkward_programs.remote_result_without_gradient(cluster))
    gradients = cluster.gradients()
    # All tensors of the message get zeros: those used without a gradient, and unused ones.
    assert gradients[1, "v"].tolist() == gradients[0, "y"].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(gradients[1, "w"], cluster.parameters[0, "x"].detach())
