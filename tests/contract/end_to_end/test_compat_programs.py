"""Programs in the style of PyTorch's tutorials give the same results with PyTorch and with Weft.

The programs are in ``tests/contract/programs``; none of them uses Weft explicitly. Losses must be
equal to the last bit wherever the program determines the order of additions.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from tests.by_torch import (
    FOLDER,
    LIMIT_S,
    PROGRAMS,
    Answers,
    compare,
    digest,
    instructions,
    read_record,
    run,
    run_by_torch,
    run_by_weft,
)

pytestmark = pytest.mark.timeout(3 * LIMIT_S + 20)


def check_equal(by_torch: Answers, found: Answers) -> None:
    assert found == by_torch


@pytest.mark.parametrize("program", ["rnn", "parameter_server", "reinforcement", "batch_update"])
def test_a_tutorials_program_computes_the_same(program: str) -> None:
    compare(f"{program}.py", run_by_weft(f"{program}.py"), check_equal)


MODULES = "rpc|autograd|optim|nn"
IMPORTS = (
    (rf"^import torch\.distributed\.({MODULES}) as", r"import torchweft.\1 as"),
    (rf"^from torch\.distributed\.({MODULES}) import", r"from torchweft.\1 import"),
)
"""The changes of imports that ``docs/migration.md`` describes."""


def write_with_our_imports(program: str, folder: Path) -> None:
    text, count = (FOLDER / program).read_text(), 0
    for stock, ours in IMPORTS:
        text, changed = re.subn(stock, ours, text, flags=re.MULTILINE)
        count += changed
    assert count
    assert not re.search(rf"torch\.distributed\.({MODULES})", text)
    (folder / program).write_text(text)


def test_a_hybrid_program_computes_the_same_also_with_other_imports(tmp_path: Path) -> None:
    by_compat = run_by_weft("ddp_hybrid.py")
    write_with_our_imports("ddp_hybrid.py", tmp_path)
    assert run("ddp_hybrid.py", folder=tmp_path) == by_compat
    compare("ddp_hybrid.py", by_compat, check_equal)


def check_pipeline(by_torch: Answers, found: Answers) -> None:
    for expected, each in zip(copy.deepcopy(by_torch), found, strict=True):
        if expected["split_size"] == 2:
            # Nothing determines the order in which gradients of eight micro-batches are added.
            expected["losses"] = pytest.approx(expected["losses"], rel=1e-6)
        assert each == expected


def test_a_pipeline_computes_the_same() -> None:
    compare("pipeline.py", run_by_weft("pipeline.py"), check_pipeline)


def test_torchruns_workers_find_one_another() -> None:
    by_weft = run_by_weft("getting_started.py")
    assert by_weft[0]["losses"]
    compare("getting_started.py", by_weft, check_equal)


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_record_is_what_pytorch_answers(program: str) -> None:
    record = read_record()
    if record is None or record["instructions"] != instructions():
        pytest.skip("no record is of this torch and processor; python -m tests.by_torch makes one")
    assert record["digest"] == digest(), "other programs; python -m tests.by_torch records again"
    check = check_pipeline if program == "pipeline.py" else check_equal
    check(record["answers"][program], run_by_torch(program))


REMADE = [
    *"AssertionError AttributeError IndexError KeyError OSError StopIteration".split(),
    "TwoPartError",
]


def _both(kind: str) -> list[str]:
    """Returns the base classes of an error that is both of a kind and a ``RuntimeError``."""
    return ["BaseException", "Exception", "RuntimeError", kind, kind, "object"]


BY_DESIGN: dict[str, tuple[object, object]] = {
    # An error keeps its kind if it can be rebuilt, and is a RuntimeError, as PyTorch's are.
    "errors_that_are_of_their_own_kind_and_runtime_errors": (
        {**{kind: [False, True] for kind in REMADE}, "OwnError": [False, False]},
        {kind: [True, True] for kind in [*REMADE, "OwnError"]},
    ),
    # Weft adds it as a note of the error (Python 3.10: as its cause).
    "remote_traceback_in_the_text_of_an_error": ([True, True], [False, False]),
    "lambdas": ("refused", 2),
    # PyTorch returns the error itself as the result.
    "an_error_set_in_a_future_of_an_asynchronous_function": (
        {"returned": "ValueError"},
        {"kinds": _both("ValueError"), "says": []},
    ),
    # PyTorch selects an overload as TorchScript does; Weft calls the function.
    "operator_that_gets_what_it_cannot_take": (
        {"kinds": ["BaseException", "Exception", "RuntimeError", "object"], "says": []},
        {"kinds": _both("TypeError"), "says": []},
    ),
    "a_reference_is_an_rref": (False, True),
    # The second one is the result of a call under torch.no_grad().
    "without_a_context": (
        [[True, True, True], [True, True, True]],
        [[True, True, True], [False, True, True]],
    ),
}
"""Probes with two right answers: PyTorch's, and Weft's."""


def check_probes(by_torch: Answers, found: Answers) -> None:
    expected, given = (
        {each["probe"]: each["result"] for each in side} for side in (by_torch, found)
    )
    assert expected.keys() == given.keys()
    assert len(expected) > 40
    different = {
        name: lines
        for name, answer in expected.items()
        if (lines := differences(answer, given[name], name))
    }
    unknown = different.keys() - BY_DESIGN.keys()
    assert not unknown, "\n".join(line for name in sorted(unknown) for line in different[name])
    assert {name: (expected[name], given[name]) for name in BY_DESIGN} == BY_DESIGN


def test_probes_are_answered_the_same() -> None:
    compare("probes.py", run_by_weft("probes.py"), check_probes)


def differences(expected: Any, found: Any, place: str) -> list[str]:
    """Returns where two answers differ; an error may be of more kinds than the expected one."""
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (e, f) in pairs for line in differences(e, f, f"{place}[{index}]")]
    if is_error(expected) and is_error(found):
        missing = set(expected["kinds"]) - set(found["kinds"])
        if not missing and expected.get("says") == found.get("says"):
            return []
    return [] if found == expected else [f"{place}: PyTorch {expected}, Weft {found}"]


def is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and "kinds" in answer
