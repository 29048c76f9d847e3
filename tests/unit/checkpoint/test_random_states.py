from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from torchweft.checkpoint import files, kinds
from torchweft.checkpoint.kinds import HostCopier


def draw() -> tuple[float, ...]:
    # Normal numbers are drawn in pairs; the generator keeps the second one for the next call.
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.normal()),
        float(torch.rand(())),
        float(torch.randn(3).sum()),
    )


def test_all_generators_go_on_from_where_they_were_also_through_a_file(tmp_path: Path) -> None:
    draw()
    states = kinds.take_random()
    drawn = [draw() for _ in range(3)]
    path = str(tmp_path / "part")
    files.write_part(path, HostCopier("random").copy(states))
    for kept in (states, files.read_part(path)):
        kinds.put_random(kept)
        assert [draw() for _ in range(3)] == drawn
    assert draw() not in drawn
