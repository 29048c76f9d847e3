from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.conformance import torchrl
from tests.contract.conformance.torchrl import (
    Ended,
    differing_versions,
    is_wrong,
    read,
    report,
    selection,
)

REPORT = """<testsuites><testsuite>
<testcase classname="test_rb" name="test_funcs[add]" time="1.5"/>
<testcase classname="test_distributed.TestRPCCollector" name="test_sync" time="2.0">
  <failure message="RuntimeError: late&#10;and more">trace</failure></testcase>
<testcase classname="test_distributed.TestRPCCollector" name="test_ray"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrl, "version", lambda _: "0.14.1")


def test_a_report_of_pytest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    assert list(read(path)) == [
        Ended("test_rb.test_funcs[add]", "pass", 1.5, ""),
        Ended("TestRPCCollector.test_sync", "fail", 2.0, "RuntimeError: late"),
        Ended("TestRPCCollector.test_ray", "skip", 0.0, ""),
    ]


def test_a_listed_test_must_fail_on_weft_and_no_other_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrl, "EXPECTED", {"a.b": "another type"})
    listed = {outcome: Ended("a.b", outcome, 0.0, "") for outcome in ("pass", "fail")}
    other = {outcome: Ended("a.c", outcome, 0.0, "no") for outcome in ("pass", "fail")}
    assert is_wrong(listed["pass"], "weft")
    assert not is_wrong(listed["fail"], "weft")
    assert is_wrong(listed["fail"], "torch")
    assert is_wrong(other["fail"], "weft")
    assert list(report([listed["fail"], other["fail"], other["pass"]], "weft")) == [
        "expected to fail: a.b: another type",
        "FAIL a.c (0.0 s) no",
        "torchrl 0.14.1 on weft: 1 pass, 2 fail, 0 skip",
    ]


def test_a_folder_without_the_tests_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no test/rb/test_rb_distributed\.py"):
        list(selection(tmp_path))
    for place in ("test/test_rb_distributed.py", "test/test_distributed.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    assert [path.name for path, _ in selection(tmp_path)] == [
        "test_rb_distributed.py",
        "test_distributed.py",
    ]


def test_a_clone_of_another_version_is_told(tmp_path: Path) -> None:
    told = tmp_path / "version.txt"
    told.write_text("0.14.1\n")
    assert not list(differing_versions(tmp_path))
    told.write_text("0.13.0\n")
    assert list(differing_versions(tmp_path)) == [
        "tests of torchrl 0.13.0, but 0.14.1 is installed"
    ]
