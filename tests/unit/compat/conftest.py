"""Turns off what joining as a program for ``torch.distributed.rpc`` turns on in the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchweft.autograd.local_pass import enable_zeros


@pytest.fixture(autouse=True)
def _turn_off_the_mode_of_compat() -> Iterator[None]:
    yield
    enable_zeros(False)
