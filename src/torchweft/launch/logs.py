"""Gives the workers of a cluster the caller's logging configuration.

Only plain values are sent: the levels of loggers, and the format of the handlers of the root
logger and of the logger ``torchweft``. Handlers are not sent: two processes cannot share a file or
a window. A worker logs to its standard error, which the caller shows behind the worker's name.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

Configuration = dict[str, Any]

_WITH_HANDLERS = ("", "torchweft")
_STYLES: dict[type[logging.PercentStyle], str] = {
    logging.StrFormatStyle: "{",
    logging.StringTemplateStyle: "$",
}


def logging_here() -> Configuration:
    """Returns this process's logging configuration, for ``configure``."""
    loggers = logging.root.manager.loggerDict
    named = {name: each for name, each in loggers.items() if isinstance(each, logging.Logger)}
    own = {name: each.level for name, each in named.items() if not _is_of_torch(name)}
    return {
        "disabled": logging.root.manager.disable,
        "levels": {"": logging.root.level} | {name: level for name, level in own.items() if level},
        "handlers": {name: _handlers(logging.getLogger(name or None)) for name in _WITH_HANDLERS},
    }


def configure(configuration: Configuration) -> None:
    """Applies a configuration from ``logging_here`` to this process, a worker."""
    logging.disable(configuration["disabled"])
    for name, level in configuration["levels"].items():
        logging.getLogger(name or None).setLevel(level)
    for name, handlers in configuration["handlers"].items():
        logger = logging.getLogger(name or None)
        logger.propagate = handlers["propagate"]
        for form in handlers["forms"]:
            handler = logging.StreamHandler()
            handler.setLevel(form.pop("level"))
            handler.setFormatter(logging.Formatter(**form))
            logger.addHandler(handler)


def _handlers(logger: logging.Logger) -> dict[str, Any]:
    shown = [handler for handler in logger.handlers if _is_shown(handler)]
    # One handler is enough: all would write to the same place, and lines would appear twice.
    least = min(shown, key=lambda handler: handler.level, default=None)
    forms = [] if least is None else [_form(least)]
    return {"propagate": logger.propagate, "forms": forms}


def _is_shown(handler: logging.Handler) -> bool:
    """Whether a handler's output is shown, and not, for instance, kept in memory."""
    if isinstance(handler, logging.NullHandler):
        return False
    if isinstance(handler, logging.FileHandler):
        return handler.baseFilename != os.devnull
    if isinstance(handler, logging.StreamHandler):
        return handler.stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return True


def _form(handler: logging.Handler) -> dict[str, Any]:
    """Returns a handler's level and format; the default format if its own cannot be used."""
    formatter = handler.formatter
    form = {"fmt": None, "datefmt": None, "style": "%"}
    if formatter is not None and isinstance(formatter._fmt, str):
        style = _STYLES.get(type(formatter._style), "%")
        form = {"fmt": formatter._fmt, "datefmt": formatter.datefmt, "style": style}
        try:
            # The format may name fields that only filters of this process add.
            logging.Formatter(**form).format(logging.makeLogRecord({}))  # type: ignore[arg-type]
        except (KeyError, ValueError):
            form = {"fmt": logging.BASIC_FORMAT, "datefmt": None, "style": "%"}
    return {"level": handler.level, **form}


def _is_of_torch(name: str) -> bool:
    """Whether a logger is PyTorch's, which configures its own loggers in each process."""
    return name == "torch" or name.startswith("torch.")
