"""Writes ``docs/security/attackers.md`` from a run: the outcome of each attack.

Run it as ``python -m tests.processes.strangers_table``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.certificates import Authority
from tests.open_workers import OpenWorkers, WarmProcess
from tests.processes.bad_members import MEMBERS, OPTIONS, SETTINGS
from tests.processes.stranger_groups import ATTACKER, Group
from tests.processes.strangers import STRANGERS, Row, tls_rows

PAGE = Path(__file__).parents[2] / "docs" / "security" / "attackers.md"

_BEGINNING = """\
# What attackers get

A run of `python -m tests.processes.strangers_table` wrote this page. Every attack in the tables
was tried on workers of a group that talk over TCP and have a secret. Meanwhile another member
constantly called the attacked worker; no call failed or took 2 s. No data of a stranger was
unpickled. Afterwards the worker had the same threads, descriptors and memory as before.
`tests/processes/test_strangers.py` and `test_bad_members.py` check each row, and that members join
and call while strangers open connections as fast as one process can (1,500 in a second). [What it
means](index.md).

## Strangers, without TLS

A *challenge* is a random number. A worker that hangs up "when the time for a greeting is up" does
so after `WEFT_CONNECT_TIMEOUT_S`, 10 s by default. At most `WEFT_STRANGER_LIMIT` (64) connections
wait like that; beyond the limit the oldest one is closed. Members are told from strangers by a
*voucher* in their first bytes.

"""

_TLS = """
## Strangers, with TLS

"""

_MEMBERS = """
## Members that are enemies

These members have the secret. The worker is [strict](callables.md), and has low limits. A member
whose connection the worker closes is lost to that worker (`WorkerLost` for its calls); all other
members go on.

| what it tries | what it gets |
|---|---|
"""


@contextmanager
def _group(warm: OpenWorkers, folder: Path, **told: Any) -> Iterator[Group]:
    folder.mkdir()
    made = Group(warm, folder, **told)
    try:
        yield made
    finally:
        made.close()


def _try_strangers(group: Group, rows: list[Row]) -> str:
    lines = ["| what it tries | what it gets |", "|---|---|"]
    for row in rows:
        got = group.suffer(row, group.victim())
        assert (got.said, got.hung_up) == (row.said, row.hung_up), got
        lines.append(f"| {row.title} | {got} |")
    return "\n".join(lines) + "\n"


def _try_members(group: Group, folder: Path) -> str:
    group.join(ATTACKER, 2)
    lines = []
    for row in MEMBERS:
        result = row.attack(group, str(folder / "was_here"))
        assert result == row.result, result
        lines.append(f"| {row.title} | {result} |")
    assert not (folder / "was_here").exists()
    return "\n".join(lines) + "\n"


def write() -> None:
    process = WarmProcess()
    warm = OpenWorkers(process, "tests.processes.strange_members")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with _group(warm, folder / "plain") as group:
            page = _BEGINNING + _try_strangers(group, STRANGERS)
        tls, another = Authority(folder).options(), Authority(folder).certificate()
        with _group(warm, folder / "tls", tls=tls) as group:
            page += _TLS + _try_strangers(group, tls_rows(another))
        with _group(warm, folder / "members", settings=SETTINGS, **OPTIONS) as group:
            page += _MEMBERS + _try_members(group, folder)
    warm.close()
    process.close()
    PAGE.write_text(page)


if __name__ == "__main__":
    write()
