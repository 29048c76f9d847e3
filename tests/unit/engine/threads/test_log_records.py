from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from torchweft.engine.threads import reports
from torchweft.engine.threads.reports import Origin


@pytest.fixture(autouse=True)
def _former_factory() -> Iterator[None]:
    former = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(former)


def made() -> tuple[str, str]:
    form = logging.Formatter("%(weft_worker)s|%(weft_call)s|%(message)s")
    worker, call, message = form.format(logging.makeLogRecord({"msg": "text"})).split("|")
    assert message == "text"
    return worker, call


def test_records_have_the_worker_and_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_WORKER_NAME", raising=False)
    reports.install()
    assert made() == ("", "")
    monkeypatch.setenv("WEFT_WORKER_NAME", "worker3")
    assert made() == ("worker3", "")
    reports.set_origin(lambda: Origin("me", "driver 7"))
    assert made() == ("me", "driver 7")
    reports.set_origin(None)
    assert made() == ("worker3", "")


def test_a_factory_of_the_program_is_kept() -> None:
    class Own(logging.LogRecord):
        pass

    logging.setLogRecordFactory(Own)
    reports.install()
    factory = logging.getLogRecordFactory()
    reports.install()
    assert logging.getLogRecordFactory() is factory
    assert isinstance(factory("name", 0, "", 0, "", (), None), Own)
