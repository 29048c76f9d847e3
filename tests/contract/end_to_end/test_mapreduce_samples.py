"""Programs in the style of ``torchopt.distributed``, with their imports changed.

They are in ``tests/contract/programs/torchopt_distributed``. Their results are compared with those
of a single process, which calls their functions for each part.
"""

from __future__ import annotations

import json
import re
import runpy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.end_to_end.apart import LIMIT_S, run_apart
from tests.inside import own_modules

PROGRAMS = Path(__file__).parents[1] / "programs" / "torchopt_distributed"

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
STARTS = {
    "torchrun": (*TORCHRUN, "3"),
    "torchweft run": ("-m", "torchweft", "run", "-n", "2"),
}

Answers = dict[str, list[dict[str, Any]]]
"""The answers that workers printed, by program, sorted by rank if they have one."""

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def answers_in(out: str) -> Answers:
    answers: Answers = defaultdict(list)
    # Do not split lines: torchrun's workers write line ends separately, so lines may mix.
    for found in re.finditer(r'{"program"', out):
        answer, _ = json.JSONDecoder().raw_decode(out, found.start())
        answers[answer["program"]].append(answer)
    for of_program in answers.values():
        of_program.sort(key=lambda answer: answer.get("rank", 0))
    return answers


# test_mapreduce_starting.py starts a sample under torchrun each time.
@pytest.fixture(
    scope="module",
    params=[pytest.param("torchrun", marks=pytest.mark.thorough), "torchweft run"],
)
def out(request: pytest.FixtureRequest) -> str:
    """The output of a group of workers that runs all programs, one after the other."""
    return run_apart(*STARTS[request.param], "all_samples.py", folder=PROGRAMS)


@pytest.fixture(scope="module")
def answers(out: str) -> Answers:
    return answers_in(out)


def functions_of(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    with own_modules(PROGRAMS):  # The examples have modules of the same names.
        return runpy.run_path(str(PROGRAMS / f"{program}.py"))


def test_a_worker_is_called_with_and_without_waiting(answers: Answers) -> None:
    for rank, answer in enumerate(answers["calling"]):
        assert answer["rank"] == rank
        assert answer["waited"] == answer["later"] == [[1, rank + 2 * 10]]


def test_each_worker_has_a_device_of_its_own(answers: Answers) -> None:
    for rank, answer in enumerate(answers["calling"]):
        assert answer["devices"] == [rank]


def test_a_recorded_call_has_gradients(answers: Answers) -> None:
    generator = torch.Generator().manual_seed(0)
    t1, t2, t4 = (torch.rand(3, 3, generator=generator) for _ in range(3))
    first, *others = [answer["gradients"] for answer in answers["calling"]]
    assert first == [t4.tolist(), t4.tolist(), (t1 + t2).tolist()]
    assert not any(others)


def test_ranks_do_what_is_theirs(out: str, answers: Answers) -> None:
    first, *others = [(answer["logged"], answer["saved"]) for answer in answers["training"]]
    assert first == ([0, 2], 2)
    assert others == [([], 0)] * len(others)
    greeting = re.findall(r"Greetings from worker\(rank=(\d)\)!", out)
    assert sorted(greeting) == [str(1 + rank) for rank in range(len(others))]


def test_losses_of_batches_are_those_of_a_single_process(answers: Answers) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, data = nn.Linear(3, 1), torch.randn(2, 5, 3)
    expected = [
        model(batch * epoch).pow(2).mean().item() for epoch in range(4) for batch in data.unbind()
    ]
    assert answers["training"][0]["losses"] == pytest.approx(expected, rel=1e-5)


def test_inner_loops_are_those_of_a_single_process(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = functions_of("maml", monkeypatch)

    def losses_of(model: nn.Module, tasks: Tensor) -> list[Tensor]:
        each = [program["inner_loop"](model, task) for task in tasks]
        return [torch.stack(each).mean()]

    assert_trained(answers["maml"], program, program, losses_of)


def test_wrapped_functions_are_those_of_a_single_process(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = functions_of("wrapping", monkeypatch)
    inner_loop = program["inner_loop"].__wrapped__
    data_parallel = program["distributed_data_parallelism"].__wrapped__
    args = program["args"]

    def losses_of(model: nn.Module, tasks: Tensor) -> list[Tensor]:
        outer_loss = torch.stack([inner_loop(model, task, args) for task in tasks]).mean()
        return [outer_loss, outer_loss + data_parallel(model, tasks[0], args)]

    assert_trained(answers["wrapping"], program, functions_of("maml", monkeypatch), losses_of)


def assert_trained(
    answers: list[dict[str, Any]],
    program: dict[str, Any],
    functions: dict[str, Any],
    losses_of: Callable[[nn.Module, Tensor], list[Tensor]],
) -> None:
    """Trains on the last of the losses, and compares all losses."""
    args = program["args"]
    with torch.random.fork_rng():
        model = functions["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    expected = []
    for epoch in range(args.epochs):
        for tasks in functions["build_dataloader"]():
            losses = losses_of(model, tasks)
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
            expected.append(pytest.approx([epoch, *(each.item() for each in losses)], rel=1e-5))
    assert [answer["losses"] for answer in answers] == [expected]


def test_all_ways_to_differentiate_give_the_same(answers: Answers) -> None:
    (answer,) = answers["differentiating"]
    expected = answer["grad_in_one_process"]
    assert_close(answer["gradients_of_a_context"], expected)
    assert_close(answer["returned_gradients"], expected)
    assert_close(answer["step_with_workers"], answer["step_in_one_process"])


def test_what_is_passed_stays_in_the_graph_with_and_without_cloning(answers: Answers) -> None:
    (answer,) = answers["differentiating"]
    assert answer["gradients_of_a_parameter"] == [[[0.25] * 2] * 2] * 2
    kinds, (of_module, of_clone) = answer["gradients_of_a_module"]
    assert kinds == ["Tensor", "Tensor"]
    assert any(of_module[0])
    assert_close([of_module], [of_clone])


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(each), torch.tensor(right), rtol=1e-5, atol=1e-6)


def test_the_whole_example_trains_as_a_single_process(answers: Answers) -> None:
    check_example(answers["converting"])


def test_the_whole_example_runs_as_the_main_program() -> None:
    out = run_apart(*TORCHRUN, "2", "converting.py", "--seed", "3", folder=PROGRAMS)
    check_example(answers_in(out)["converting"])


def check_example(answers: list[dict[str, Any]]) -> None:
    assert len(answers) in (2, 3)
    for rank, answer in enumerate(answers):
        assert (answer["titles"], answer["devices"]) == ([f"Worker{rank}"], [f"cuda:{rank}"])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        data = torch.randn(3, 7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for epoch in range(2):
        for batch in data:
            loss = (model(batch[:, :2]) - batch[:, 2:]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(pytest.approx([epoch, loss.item()], rel=1e-5))
    assert answers[0]["losses"] == expected
    assert not any(answer["losses"] for answer in answers[1:])
