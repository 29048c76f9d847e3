from __future__ import annotations

import base64
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchweft import rpc
from torchweft.errors import ConfigurationError, RemoteError
from torchweft.launch.job import (
    _furnish,
    check_options,
    configure,
    logging_here,
    report_error,
    setup_error,
)


@pytest.fixture(autouse=True)
def _bare() -> Iterator[None]:
    """Removes pytest's handlers for the test, and restores the loggers after it."""
    loggers = [logging.root, logging.getLogger("torchweft"), logging.getLogger("mine")]
    former = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = []
    yield
    logging.disable(logging.NOTSET)
    for logger, handlers, level, propagate in former:
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def move_to_worker() -> None:
    """Configures logging as in a worker whose loggers are not configured yet."""
    configuration = json.loads(json.dumps(logging_here()))  # as it is sent
    for name in ("torchweft", "mine", None):
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:], logger.propagate = [], True
        logger.setLevel(logging.NOTSET if name else logging.WARNING)
    configure(configuration)


def add(handler: logging.Handler, form: str | None = None, **others: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(form, **others))  # type: ignore[arg-type]
    logging.root.addHandler(handler)
    return handler


@pytest.mark.parametrize(
    ("form", "others"),
    [
        ("%(levelname)s|%(name)s|%(message)s", {}),
        ("{levelname}|{name}|{message}", {"style": "{"}),
        ("${levelname}|${name}|${message}", {"style": "$"}),
    ],
)
def test_level_and_format_are_taken_over(
    form: str, others: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    add(logging.StreamHandler(sys.stdout), form, **others)
    logging.root.setLevel(logging.INFO)
    logging.getLogger("mine").setLevel(logging.DEBUG)
    move_to_worker()
    logging.getLogger("mine").debug("detail")
    logging.getLogger("other").info("news")
    logging.getLogger("other").debug("detail")
    assert capsys.readouterr().err == "DEBUG|mine|detail\nINFO|other|news\n"


def test_a_format_with_fields_of_a_filter_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    add(logging.StreamHandler(), "%(request)s %(message)s")
    move_to_worker()
    logging.getLogger("mine").warning("careful")
    assert capsys.readouterr().err == "WARNING:mine:careful\n"


def test_the_logger_of_weft_may_have_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    add(logging.StreamHandler(), "all: %(message)s")
    own = logging.StreamHandler()
    own.setFormatter(logging.Formatter("weft: %(message)s"))
    logger = logging.getLogger("torchweft")
    logger.addHandler(own)
    logger.propagate = False
    move_to_worker()
    logging.getLogger("torchweft").warning("careful")
    logging.disable(logging.ERROR)
    move_to_worker()
    logging.getLogger("torchweft").warning("careful")
    assert capsys.readouterr().err == "weft: careful\n"


def test_options_of_the_main_program_are_refused_before_workers_start() -> None:
    def serve() -> None: ...

    class Reference(rpc.RRef[int]): ...

    for each in (serve, Reference):
        each.__module__, each.__qualname__ = "__main__", each.__name__
    for given in ({"callables": (serve,), "strict": True}, {"reference_type": Reference}):
        with pytest.raises(ConfigurationError, match="which is defined in the main program"):
            check_options(rpc.RpcBackendOptions(**given))  # type: ignore[arg-type]
    check_options(rpc.RpcBackendOptions(callables=(len, pytest.raises), strict=True))


class Picky(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


@pytest.mark.parametrize("error", [KeyError("none"), Picky(3, "none"), SystemExit("none")])
def test_the_error_of_a_setup_reaches_the_caller_with_its_traceback(
    error: BaseException, tmp_path: Path
) -> None:
    report = str(tmp_path / "report")
    assert setup_error(report) is None
    try:
        raise error
    except BaseException as raised:
        report_error(report, raised, "worker1")
    found = setup_error(report)
    told = found if isinstance(found, RemoteError) else getattr(found, "__cause__", None)
    assert isinstance(told, RemoteError)
    assert "in test_the_error_of_a_setup" in str(told)
    assert (told.worker, told.type_name.rpartition(".")[2]) == ("worker1", type(error).__name__)
    assert isinstance(found, KeyError if isinstance(error, KeyError) else RemoteError)


def fail() -> None:
    raise KeyError("no such data set")


def test_a_setup_that_fails_on_another_host_raises_there() -> None:
    setup = base64.b64encode(pickle.dumps(fail)).decode()
    report = "/no/folder/of/this/host/report"
    job = {"logs": logging_here(), "device": "", "setup": setup, "report": report, "name": "a"}
    with pytest.raises(KeyError, match="no such data set"):
        _furnish(job)
