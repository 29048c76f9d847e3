from __future__ import annotations

from pathlib import Path

from tests.contract.conformance.cases import CaseName
from tests.contract.conformance.comparing import Comparison
from tests.contract.conformance.table import (
    count,
    findings,
    format_table,
    gpu_summary,
    last_lines,
    tables,
)
from tests.tools.conformance.results import case, verdict

ADD, SUB, MUL = case("test_add"), case("test_sub"), case("test_mul", "JitRpcTest")

LOG = """\
E1121 22:18:32.908000 21908 /site-packages/torch/testing/common.py:1122] Caught exception:
Traceback (most recent call last):
ValueError: 7 is too much

----------------------------------------------------------------------
Ran 1 test in 0.300s

FAILED (errors=1)
"""


def test_tables_count_by_category_and_class() -> None:
    verdicts = [verdict(ADD, "pass"), verdict(SUB, "timeout"), verdict(MUL, "fail")]
    comparison = Comparison(on_purpose=verdicts[2:])
    lines = list(tables(verdicts, comparison, {SUB: "shim", ADD: "public"}))
    assert lines == [
        "category  tests  pass  fail  expected to fail  skip",
        "shim          1     -     1                 -     -",
        "public        1     1     -                 -     -",
        "unknown       1     -     -                 1     -",
        "all           3     1     1                 1     -",
        "",
        "class          tests  pass  fail  expected to fail  skip",
        "tp.RpcTest         2     1     1                 -     -",
        "tp.JitRpcTest      1     -     -                 1     -",
        "all                3     1     1                 1     -",
    ]


def test_one_row_needs_no_sum() -> None:
    counts = count([verdict(ADD, "skip")], [], lambda name: name.group)
    assert len(format_table("class", counts)) == 2


def test_failure_shows_the_end_of_its_log_and_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    comparison = Comparison(regressed=[verdict(ADD, "timeout", log=log)])
    lines = list(findings(comparison, "2.13.0", "2.13.0"))
    assert lines[1].startswith("1 listed as passing, did not pass: mend it, or say in expected.csv")
    assert lines[2] == f"  TIMEOUT tp.RpcTest.test_add (0.5 s), {log}"
    assert lines[3:] == [
        "      Caught exception:",
        "      Traceback (most recent call last):",
        "      ValueError: 7 is too much",
    ]


def test_tests_for_the_gpus_of_a_machine_are_counted(tmp_path: Path) -> None:
    said = {
        "more": "test_x ... skipped 'Need at least 2 CUDA devices'\n\nOK (skipped=1)\n",
        "other": 'test_x ... skipped "it\'s broken"\n',
    }
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    cases = [CaseName("cuda", "CudaRpcTest", f"test_{number}") for number in range(6)]
    verdicts = [
        verdict(cases[0], "pass"),
        verdict(cases[1], "timeout"),
        verdict(cases[2], "skip", log=tmp_path / "more"),
        verdict(cases[3], "skip", log=tmp_path / "other"),
        verdict(cases[4], "skip", log=tmp_path / "no log"),
        verdict(ADD, "fail"),
    ]
    assert list(gpu_summary(verdicts, {})) == [
        "",
        "CUDA tests that the GPUs of this machine can run: 4, of which 1 passed, 1 failed, "
        "2 skipped; 1 more need more GPUs",
        "  TIMEOUT cuda.CudaRpcTest.test_1",
        "  SKIP cuda.CudaRpcTest.test_3 it's broken",
        "  SKIP cuda.CudaRpcTest.test_4",
    ]


def test_another_torch_is_mentioned_where_something_is_missing() -> None:
    lines = list(findings(Comparison(missing=[ADD]), "2.13.0", "2.7.1"))
    assert "not among the tests of torch 2.7.1 (recorded with torch 2.13.0, not 2.7.1)" in lines[1]
    assert "--update" in lines[1]
    assert lines[2] == "  tp.RpcTest.test_add"


def test_new_unlisted_and_unsteady_are_named() -> None:
    comparison = Comparison(
        new=[verdict(ADD, "pass")],
        unlisted=[verdict(SUB, "fail")],
        unsteady=[verdict(MUL, "pass", "fail", "pass")],
    )
    text = "\n".join(findings(comparison, "2.13.0", "2.13.0"))
    assert (
        "1 pass that are not listed as passing: --update adds them\n  tp.RpcTest.test_add" in text
    )
    assert "1 failed, and expected.csv says nothing of them" in text
    assert "2 of 3  tp.JitRpcTest.test_mul" in text


def test_nothing_to_say() -> None:
    assert list(findings(Comparison(), "2.13.0", "2.13.0")) == []


def test_log_that_is_not_there() -> None:
    assert last_lines(Path("nowhere")) == ["(no log)"]
