"""Finds the calls in the source that may block: waits for threads, processes, sockets and time.

A ``with`` block of a lock is none: the code that holds the lock waits for nothing else, or the wait
in it is found by itself. Neither are calls that say that they do not block.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "torchweft"

METHODS = frozenset(
    """
    accept acquire communicate connect join poll recv recv_into recvfrom recvmsg recvmsg_into result
    select sendall sendmsg synchronize wait wait_for
    """.split()
)
"""Methods that wait, whatever their object is."""

FUNCTIONS = frozenset(
    """
    all_gather_object all_reduce all_gather barrier broadcast broadcast_object_list collect_all
    create_connection flock getaddrinfo init_process_group lockf new_group sleep urlopen wait_all
    waitpid FileStore TCPStore ThreadPoolExecutor
    """.split()
)
"""Functions and methods that wait, whose first argument is of no matter."""

SUBPROCESS = frozenset({"run", "call", "check_call", "check_output"})

_NOT_QUEUES = ("knobs", "knob", "current_call", "current_id", "_context", "environ")
_TEXTS = ("path", "pathsep", "sep", "shlex", "gap", "linesep", "separator")


def find_waits() -> dict[str, set[str]]:
    """Returns the names of the calls that may block, by ``module:function`` where they stand."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for place, name in _waits_in(ast.parse(path.read_text()), ()):
            found.setdefault(f"{module}:{place}", set()).add(name)
    return found


def _waits_in(node: ast.AST, scopes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = scopes
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = (*scopes, child.name)
        if isinstance(child, ast.Call):
            name = _wait_of(child)
            if name:
                yield ".".join(scopes) or "<module>", name
        yield from _waits_in(child, inner)


def _wait_of(call: ast.Call) -> str:
    """Returns the name of a call that may block, or nothing."""
    function = call.func
    if isinstance(function, ast.Name):
        if function.id == "map":  # So that Ctrl-C does not come between a lock and a note of it.
            return "acquire" if _last_name(call.args[0]) == "acquire" else ""
        # ``acquire`` of ``runtime.interrupts`` is a function.
        is_wait = function.id in FUNCTIONS or function.id == "acquire"
        return function.id if is_wait and not _does_not_block(function.id, call) else ""
    if not isinstance(function, ast.Attribute):
        return ""
    name, on = function.attr, _last_name(function.value)
    if name in SUBPROCESS and on == "subprocess":
        return f"subprocess.{name}"
    if name == "get":
        return "get" if _is_queue_get(call, on, function.value) else ""
    if name == "join":
        return "join" if _is_thread_join(call, on, function.value) else ""
    if name in FUNCTIONS:
        return name
    if name not in METHODS or _does_not_block(name, call):
        return ""
    return name


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_queue_get(call: ast.Call, on: str, value: ast.AST) -> bool:
    if any(keyword.arg == "timeout" for keyword in call.keywords):
        return True
    if call.args or call.keywords or on in _NOT_QUEUES:
        return False
    # A knob is an attribute of the module; so are context variables, in lower case.
    of_knobs = isinstance(value, ast.Attribute) and _last_name(value.value) == "knobs"
    return not of_knobs and not on.isupper()


def _is_thread_join(call: ast.Call, on: str, value: ast.AST) -> bool:
    if isinstance(value, (ast.Constant, ast.JoinedStr)) or on in _TEXTS:
        return False
    if isinstance(value, ast.Call):
        return False  # ``bytearray().join(parts)``
    return len(call.args) <= 1


def _does_not_block(name: str, call: ast.Call) -> bool:
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    first = values[0] if values else None
    if name == "acquire":
        blocking = [each.value for each in call.keywords if each.arg == "blocking"] or [first]
        return isinstance(blocking[0], ast.Constant) and blocking[0].value is False
    if name == "poll":
        # ``Popen.poll()`` does not block, ``select.poll().poll()`` would for ever.
        return first is None or (isinstance(first, ast.Constant) and first.value == 0)
    return False
