"""The jobs of a forked worker process: become a program, run a script, or serve calls.

The launcher sends a job to the nursery as a dictionary of plain values. The process that the
nursery forks for the job runs it at the bottom of its stack. From there the interpreter ends as
it does for any program: threads are joined, exit handlers run.

A job that serves calls carries the caller's logging configuration, as plain values only: the levels
of loggers, and the format of the handlers of the root logger and of the logger ``torchweft``.
Handlers are not sent: two processes cannot share a file or a window. A worker logs to its standard
error, which the caller shows behind the worker's name.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import faulthandler
import io
import logging
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchweft import standard_streams
from torchweft.errors import ConfigurationError, RemoteError, RendezvousTimeout, ShutdownError
from torchweft.launch.signals import AwaitedSignal, stacks_signal
from torchweft.launch.worker import seed_generators

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions

Job = dict[str, object]

_MAIN_MODULES = ("__main__", "__mp_main__")
_STANDARD_ERROR = 2


def program_job(arguments: Sequence[str]) -> Job:
    """Replaces the process by the program ``arguments[0]``, as a shell would start it."""
    return {"kind": "program", "arguments": list(arguments)}


def script_job(path: str, arguments: Sequence[str]) -> Job:
    """Runs a script in the warm process, as ``python path`` would."""
    return {"kind": "script", "path": path, "arguments": list(arguments)}


def module_job(module: str, arguments: Sequence[str]) -> Job:
    """Runs a module in the warm process, as ``python -m module`` would."""
    return {"kind": "module", "module": module, "arguments": list(arguments)}


def serve_job(
    name: str,
    rank: int,
    world_size: int | None,
    *,
    options: RpcBackendOptions,
    rendezvous: str,
    seed: int | None,
    setup: bytes | None,
    device: str,
    report: str,
) -> Job:
    """Joins a group and serves calls until the group shuts down.

    The worker can import what this process can: it gets its ``sys.path``.

    Args:
        name: The worker's name.
        rank: Its rank.
        world_size: Workers in the group; None for an open group, in which it serves until it is
            asked to end, by ``SIGTERM``.
        options: Options of the worker, without init method and store.
        rendezvous: Where the group meets: ``file://PATH``; or ``tcp://HOST:PORT`` of the store in
            the caller, for a worker of another host.
        seed: The worker's seed; None for a different seed in each life.
        setup: A function that the worker runs first, serialized by ``cloudpickle``.
        device: Its CUDA device; or another device, which is left to the program; or empty.
        report: The file that it writes if the preparation fails, for ``setup_error``.
    """
    return {
        "kind": "serve",
        "name": name,
        "rank": rank,
        "world_size": world_size,
        "options": base64.b64encode(pickle.dumps(options)).decode(),
        "rendezvous": rendezvous,
        "path": list(sys.path),
        "seed": seed,
        "setup": None if setup is None else base64.b64encode(setup).decode(),
        "device": device,
        "report": report,
        "logs": logging_here(),
    }


def check_options(options: RpcBackendOptions) -> None:
    """Checks options before workers are started with them.

    Raises:
        ConfigurationError: A value is invalid, or is defined in the main program, which the workers
            do not run.
    """
    from torchweft import extending

    options.check()
    given = [("callables", each) for each in options.callables]
    for name, each in [*given, ("reference_type", options.reference_type)]:
        if getattr(each, "__module__", None) in _MAIN_MODULES:
            raise ConfigurationError(
                f"{name} has {extending.function_name(each)}, which is defined in the main "
                "program; workers of a cluster do not run that program: define it in a module, and "
                "import it from there"
            )


def setup_error(report: str) -> BaseException | None:
    """Returns the error that a worker's preparation reported in a file, if any."""
    try:
        file = io.BytesIO(Path(report).read_bytes())
    except FileNotFoundError:
        return None
    told: RemoteError = pickle.load(file)
    try:
        error: Exception = pickle.load(file)
    except Exception:  # It was not written, or cannot be made here.
        return told
    error.__cause__ = told
    return error


def report_error(report: str, error: BaseException, worker: str) -> None:
    """Writes how a worker's preparation failed, as text and as itself, for ``setup_error``."""
    import cloudpickle

    text = traceback.format_exception_only(error)[-1] + "".join(traceback.format_exception(error))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    with open(report, "wb") as file:
        pickle.dump(RemoteError(text, type_name=kind, worker=worker), file)
        # Others, such as SystemExit, would end the caller.
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):  # an attribute that cannot be pickled
                file.write(cloudpickle.dumps(error))


def run_job(job: Job, own_path: Sequence[str]) -> None:
    """Runs ``job``; ``own_path`` is ``sys.path`` as the interpreter made it."""
    try:
        _JOBS[str(job["kind"])](job, own_path)
    except KeyboardInterrupt:  # in a worker that serves; programs report theirs
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _end_at_once(lambda: os.kill(os.getpid(), signal.SIGINT))


def _run_program(job: dict[str, Any], own_path: Sequence[str]) -> NoReturn:
    arguments = job["arguments"]
    try:
        os.execv(arguments[0], arguments)
    except OSError as error:
        sys.exit(f"weft: {arguments[0]} cannot be started: {error.strerror}")


def _run_script(job: dict[str, Any], own_path: Sequence[str]) -> None:
    _refresh_after_fork(job)
    path = job["path"]
    main = _fresh_main_module(own_path, os.path.dirname(os.path.realpath(path)))
    sys.argv[:] = [path, *job["arguments"]]
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __spec__=None, __package__=None)
    with open(path, "rb") as file:
        source = file.read()
    _as_main_program(lambda: exec(compile(source, path, "exec"), main.__dict__))


def _run_module(job: dict[str, Any], own_path: Sequence[str]) -> None:
    _refresh_after_fork(job)
    _fresh_main_module(own_path, os.getcwd())
    sys.argv[:] = ["-m", *job["arguments"]]
    # The interpreter itself calls this function for -m. It runs in the real __main__ module; the
    # public run_module does not.
    run_as_main: Callable[[str], object] = vars(runpy)["_run_module_as_main"]
    _as_main_program(lambda: run_as_main(job["module"]))


def _serve(job: dict[str, Any], own_path: Sequence[str]) -> None:
    is_open = job["world_size"] is None
    end = AwaitedSignal(signal.SIGTERM) if is_open else None
    options = _prepare_to_serve(job)
    from torchweft import extending, rpc
    from torchweft.launch import cluster_store

    cluster_store.meet(options, job["rendezvous"], job["world_size"])
    try:
        extending.join_group(job["name"], job["rank"], job["world_size"], options)
    except RendezvousTimeout:
        if is_open:
            raise
        sys.exit(1)  # The caller has rank 0, and reports the missing workers.
    cluster_store.joined.set()
    if end is not None:
        end.wait()
        rpc.shutdown()
        _end_at_once()
    # The worker serves meanwhile, for as long as the caller wants, so the wait is not reported.
    # The caller leads the shutdown, and reports lost workers.
    with contextlib.suppress(ShutdownError):
        extending.leave_group(0.0, contextlib.nullcontext)
    _end_at_once()


def _prepare_to_serve(job: dict[str, Any]) -> RpcBackendOptions:
    """Prepares the process to serve the caller; returns the options of the worker."""
    sys.path[:] = job["path"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    options: RpcBackendOptions = pickle.loads(base64.b64decode(job["options"]))
    _refresh_after_fork(job)  # torch is loaded now, even if the nursery had not imported it
    if (number := stacks_signal()) is not None:  # Joining does this too, but after the setup.
        faulthandler.register(number, file=_STANDARD_ERROR, all_threads=True, chain=False)
    _furnish(job)
    return options


def _furnish(job: dict[str, Any]) -> None:
    """Applies logging, device and setup; on failure, reports the error and ends the process."""
    try:
        configure(job["logs"])
        if job["device"].startswith("cuda"):
            import torch

            torch.cuda.set_device(job["device"])
        if job["setup"] is not None:
            pickle.loads(base64.b64decode(job["setup"]))()
    except BaseException as error:
        if not os.path.isdir(os.path.dirname(job["report"])):  # on another host: its output tells
            raise
        report_error(job["report"], error, job["name"])
        sys.exit(1)


def _refresh_after_fork(job: dict[str, Any]) -> None:
    """Seeds the generators and sets the thread count, which a fork copies from the nursery."""
    seed_generators(job.get("seed"))
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) != torch.get_num_threads():
            torch.set_num_threads(int(threads))


def _end_at_once(end: Callable[[], None] = lambda: os._exit(0)) -> NoReturn:
    """Ends the process like a program, but without tearing the interpreter down.

    With torch imported the teardown costs 0.1 to 0.4 s of processor time in every worker, and
    writes to pages that the workers share. Functions of other workers may still run, in daemon
    threads: one that came back from C++ during the teardown would abort the process.

    Args:
        end: Ends the process.
    """
    vars(threading)["_shutdown"]()  # joins the non-daemon threads
    vars(atexit)["_run_exitfuncs"]()
    standard_streams.flush()
    end()
    os._exit(0)


def _fresh_main_module(own_path: Sequence[str], program_directory: str) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    is_safe = getattr(sys.flags, "safe_path", False)
    sys.path[:] = [*own_path] if is_safe else [program_directory, *own_path]
    return main


def _as_main_program(body: Callable[[], object]) -> None:
    """Runs ``body``; reports its exception without the launcher's frames."""
    try:
        body()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
            trace = trace.tb_next
        BaseException.with_traceback(error, trace)
        sys.excepthook(type(error), error, trace)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


_JOBS: dict[str, Callable[[dict[str, Any], Sequence[str]], None]] = {
    "program": _run_program,
    "script": _run_script,
    "module": _run_module,
    "serve": _serve,
}


# Logging

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
