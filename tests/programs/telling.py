"""Tells all that it can of itself and of what it has been told, as careless programs do.

Two workers log everything, raise errors with all local variables shown, dump their environments,
command lines and objects, and start another program. Nothing of it may show the group's secret.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import logging
import os
import pickle
import pprint
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchweft import rpc
from torchweft.engine.worker.current import current
from torchweft.secret import Secret


def say(title: str, content: object) -> None:
    print(f"== {title}: {content}", flush=True)


def safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # It is not complete yet.
        return f"{type(value).__name__}, of which there is only {vars(value)}: {error}"


def tell_error(title: str, call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except Exception as error:
        say(title, "".join(traceback.format_exception(error)))
        for frame, line in traceback.walk_tb(error.__traceback__):
            shown = {name: safe_repr(value) for name, value in frame.f_locals.items()}
            say(f"local variables at line {line} of {frame.f_code.co_name}", shown)
        logging.getLogger("torchweft").exception(title)
    else:
        say(title, "no error")


def fail_with_all(options: rpc.RpcBackendOptions, secret: Secret | None) -> None:
    agent = current()
    connector, key = agent._connector, agent._connector.key
    everything = [vars(options), vars(agent), vars(connector), os.environ, secret, key]
    raise ValueError(f"{options!r} {options!s} {secret!r} {secret!s} {everything!r}")


def tell_processes() -> None:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                say(f"command line of {process.name}", (process / "cmdline").read_bytes())
            except OSError:
                continue  # It has ended meanwhile.


def tell_objects() -> None:
    """Tells every secret, and whatever has one, as a tool that looks for leaks would."""
    gc.collect()
    for each in gc.get_objects():
        # One that is not tracked is seen in what has it.
        for found in gc.get_referents(each):
            if isinstance(found, (Secret, rpc.RpcBackendOptions)):
                say("object", f"{found!r} in {type(each).__name__}")


def main() -> None:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    faulthandler.enable()
    options = rpc.RpcBackendOptions(rpc_timeout=20.0)
    rpc.init_rpc(rpc_backend_options=options)
    me = rpc.get_worker_info()
    other = f"worker{1 - me.id}"
    say("who", me)
    say("has a secret", options.secret is not None)
    rpc.barrier()
    tell_error("all", fail_with_all, options, options.secret)
    tell_error("remote", rpc.rpc_sync, other, fail_with_all, (options.secret,))
    tell_error("remote, pickled", rpc.rpc_sync, other, print, (options,))
    for pickled in (options, options.secret, current()):
        tell_error("pickled", pickle.dumps, pickled)
    say("copied", copy.copy(options))
    tell_error("copied deeply", lambda: say("deep", copy.deepcopy(options.secret)))
    tell_error("another", rpc.RpcBackendOptions(secret="not one").check)  # type: ignore[arg-type]
    say("options", pprint.pformat(options))
    say("environment", dict(os.environ))
    said = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    say("environment of another program", said)
    tell_objects()
    tell_processes()
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    rpc.barrier()
    rpc.shutdown()
    say("all told", me)


if __name__ == "__main__":
    tell_error("end", main)
