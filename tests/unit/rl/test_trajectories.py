from __future__ import annotations

import pytest
import torch
from hypothesis import given as for_any
from hypothesis import strategies as st

from torchweft.errors import ConfigurationError
from torchweft.rl import v_trace


@for_any(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 4))
def test_it_is_the_sum_of_the_paper(seed: int, steps: int, environments: int) -> None:
    """Each target as the paper defines it: a sum over all later steps of the episode."""
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        return torch.randn(steps, environments, generator=generator, dtype=torch.float64)

    logs, rewards, values, last = numbers(), numbers(), numbers(), numbers()
    terminated, truncated = numbers() > 1, numbers() > 1
    ends = terminated | truncated
    following = torch.cat([values[1:], last[:1]])
    following = torch.where(ends, last, following)
    discount, decay, most = 0.9, 0.8, 1.2
    found = v_trace(
        logs, rewards, values, following, terminated, ends,
        discount=discount, trace_decay=decay, most_ratio=most,
    )  # fmt: skip
    targets = torch.zeros_like(values)
    for column in range(environments):
        for first in range(steps):
            target, factor = values[first, column].item(), 1.0
            for step in range(first, steps):
                ratio = min(most, float(logs[step, column].exp()))
                after = 0.0 if terminated[step, column] else float(following[step, column])
                gain = rewards[step, column] + discount * after - values[step, column]
                target += factor * ratio * float(gain)
                factor *= discount * decay * ratio
                if ends[step, column]:
                    break
            targets[first, column] = target
    assert torch.allclose(found.targets, targets)
    for column in range(environments):
        for step in range(steps):
            is_cut = step + 1 == steps or bool(ends[step, column])
            after = following[step, column] if is_cut else targets[step + 1, column]
            after = 0.0 if terminated[step, column] else float(after)
            gain = float(rewards[step, column] + discount * after - values[step, column])
            expected = min(most, float(logs[step, column].exp())) * gain
            assert abs(float(found.advantages[step, column]) - expected) < 1e-9


def test_tensors_that_pytorch_would_stretch_are_refused() -> None:
    zeros, flags = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    good = [zeros, zeros, zeros, zeros, flags, flags]
    for place, bad, error, text in (
        (1, zeros[:, :1], ConfigurationError, r"rewards has the shape \[4, 1\]"),
        (2, zeros[..., None], ConfigurationError, r"and values \[4, 2, 1\]"),
        (4, flags.long(), TypeError, "terminated is a tensor of torch.int64"),
        (5, flags.float(), TypeError, "ends is a tensor of torch.float32"),
    ):
        given = [*good[:place], bad, *good[place + 1 :]]
        with pytest.raises(error, match=text):
            v_trace(*given, discount=0.9)
    with pytest.raises(ConfigurationError, match="no steps"):
        v_trace(*[each[:0] for each in good], discount=0.9)
