"""The page on hybrid models: its programs run unchanged, its plan and messages are true."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage
from tests.pages import figure_of, text_of
from torchweft import checkpoint
from torchweft.embedding import SGD, Copies
from torchweft.hybrid import HybridModel, recover
from torchweft.launch import cluster

PAGE = "docs/hybrid.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_trainers_and_servers_compute_the_same_as_one_process(run: RunPage, guide: Path) -> None:
    expected = [figure_of(line) for line in run(guide / "alone.py")]
    assert len(expected) == 5
    lines = run(guide / "on_workers.py")
    # The tolerance is that of the printed digits.
    assert [figure_of(line) for line in lines[:5]] == pytest.approx(expected, abs=2e-4)
    plan = "\n".join(lines[5:])
    assert f"```\n{plan}\n```" in text_of(PAGE), plan


def test_a_restored_run_continues_with_the_same_losses(run: RunPage, guide: Path) -> None:
    lines = run(guide / "snapshots.py")
    assert len(lines) == 7
    assert lines[3:5] == lines[5:7]


@pytest.mark.thorough
def test_a_run_recovers_from_a_killed_server_by_itself(run: RunPage, guide: Path) -> None:
    expected = [figure_of(line) for line in run(guide / "alone.py")]
    lines = [line for line in run(guide / "recovering.py") if line.startswith("step")]
    assert [line[:7] for line in lines] == [f"step {step}:" for step in (0, 1, 2, 2, 3, 4)]
    found = [figure_of(line) for line in lines]
    assert found == pytest.approx([*expected[:3], *expected[2:]], abs=2e-4)


def make_mistakes(guide: Path) -> dict[str, Callable[[], object]]:
    build: Callable[[], Any] = runpy.run_path(str(guide / "alone.py"))["build_model"]
    servers = ["worker0"]

    def change(**options: Any) -> Any:
        model = build()
        for name in ("words", "days"):
            for option, value in options.items():
                setattr(getattr(model, name), option, value)
        return model

    def look_up() -> None:
        model = HybridModel(build(), servers, places={"days": Copies()})
        try:
            model(torch.tensor([[3, 20_000]]), torch.tensor([1]))
        finally:
            model.close()

    def save_alone() -> None:
        model = HybridModel(build(), servers, places={"days": Copies()})
        try:
            checkpoint.save(guide / "runs", {"model": model}, step=0)
        finally:
            model.close()

    def step_others() -> None:
        model = HybridModel(build(), servers, places={"days": Copies()})
        other = nn.Parameter(torch.zeros(3))
        try:
            model.optimizer(SGD(), lambda _: torch.optim.SGD([other]))
        finally:
            model.close()

    def recover_in_a_group() -> None:
        place = f"file://{guide / 'group'}"
        distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
        try:
            recover(lambda: (None,), print, steps=1, directory=guide / "runs", every=1)
        finally:
            distributed.destroy_process_group()

    return {
        "PlacementError: places names": lambda: HybridModel(
            build(), servers, places={"word": Copies()}
        ),
        "PlacementError: 'words' has": lambda: HybridModel(change(max_norm=1.0), servers),
        "PlacementError: the module": lambda: HybridModel(change(sparse=False), servers),
        "PlacementError: no server": lambda: HybridModel(build(), []),
        "PlacementError: group 0": step_others,
        "IdOutOfRange": look_up,
        "ArgumentTypeError": save_alone,
        "ConfigurationError: there is a process group": recover_in_a_group,
    }


def test_the_messages_are_those_of_the_page(guide: Path) -> None:
    shown = re.findall(r"^\| .* \| `(\w+: .*?)` \|$", text_of(PAGE), re.M)
    assert len(shown) == 8
    with cluster(workers=1):
        for beginning, mistake in make_mistakes(guide).items():
            with pytest.raises(Exception, match=r".") as raised:
                mistake()
            (expected,) = [text for text in shown if text.startswith(beginning)]
            assert f"{type(raised.value).__name__}: {raised.value}" == expected
