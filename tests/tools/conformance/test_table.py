from __future__ import annotations

from pathlib import Path

from tests.contract.conformance.comparing import Comparison
from tests.contract.conformance.table import (
    findings,
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
