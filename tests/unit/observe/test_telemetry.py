"""What is told outside of a group; ``tests/processes/test_telemetry.py`` has the spans."""

from __future__ import annotations

import sys

import pytest

from torchweft import observe
from torchweft.errors import ConfigurationError, NotInitialized


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchweft.observe.telemetry", raising=False)
    monkeypatch.delattr("torchweft.observe.telemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'torchweft\[otel\]'"):
        observe.spans()


def test_a_process_that_is_no_worker_makes_no_spans() -> None:
    pytest.importorskip("opentelemetry", reason="needs the extra 'otel'")
    with pytest.raises(NotInitialized):
        observe.spans().start()
