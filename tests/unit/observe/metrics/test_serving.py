"""Mistakes in serving metrics, outside of a group."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from torchweft import observe
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotInitialized

MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: observe.metrics.serve("9400"), ArgumentTypeError, "port"),  # type: ignore[arg-type]
    (lambda: observe.metrics.serve(70_000), ConfigurationError, "up to 65535"),
    (lambda: observe.metrics.serve(host=None), ArgumentTypeError, "host"),  # type: ignore[arg-type]
    (lambda: observe.metrics.serve(group=1), ArgumentTypeError, "all workers"),  # type: ignore[arg-type]
    (lambda: observe.metrics.read(timeout=0), ConfigurationError, "positive number of seconds"),
    (lambda: observe.metrics.read(timeout="2"), ArgumentTypeError, "timeout"),  # type: ignore[arg-type]
    (lambda: observe.metrics.read(), NotInitialized, "init_rpc"),
]


@pytest.mark.parametrize(("call", "kind", "told"), MISTAKES)
def test_a_mistake_is_told(call: Callable[[], object], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        call()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchweft.observe.metrics.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'torchweft\[metrics\]'"):
        observe.metrics.serve()
