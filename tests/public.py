"""Finds what a module takes from Weft that is not public.

Public is what ``docs/api`` documents: the names of a module with ``automodule``, and single objects
with ``autoclass`` and ``autofunction``. The modules of ``torchweft.compat`` have the names of the
modules of PyTorch that they replace, private ones too.

The look is at the source only. It finds imports, attributes of what is imported, and dotted names
and imports within strings, such as programs that a test writes. It finds private attributes by
their underscore: those of the module's own objects and of other packages are known, and any other
counts as one of Weft's.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

OPERATORS_ONLY = frozenset({"torchweft.knobs"})
"""Documented for operators, who set variables of the environment: a test does the same."""

REPLACED = {
    "torchweft.compat.rpc": "torch.distributed.rpc",
    "torchweft.compat.autograd": "torch.distributed.autograd",
    "torchweft.compat.optimizer": "torch.distributed.optim.optimizer",
    "torchweft.compat.remote_module": "torch.distributed.nn.api.remote_module",
}
"""The modules of the drop-in, and those of PyTorch that they replace."""

OF_OTHERS = frozenset(
    "_asdict _fields _make _replace "  # named tuples
    "_metadata _parameters "  # modules of torch.nn
    "_run _spawn_processes _start_processes".split()  # PyTorch's classes of tests
)
"""Private names that are not Weft's."""

_DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: ([\w.]+)", re.MULTILINE)
_DOTTED = re.compile(r"(?<![\w.])torchweft(?:\.[A-Za-z_]\w*)+")
_IMPORT = re.compile(r"^[ \t]*((?:from|import) torchweft[^\n(\\]*)", re.MULTILINE)


@functools.cache
def documented() -> tuple[frozenset[str], frozenset[str]]:
    """Returns the modules, and the single objects of others, that ``docs/api`` has."""
    modules, objects = set(), set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for kind, name in _DIRECTIVE.findall(page.read_text()):
            (modules if kind == "module" else objects).add(name)
    return (
        frozenset(modules | {"torchweft"}) - OPERATORS_ONLY,
        frozenset(name for name in objects if name.rpartition(".")[0] not in OPERATORS_ONLY),
    )


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """Returns ``__all__`` of a module, or else the public names that it defines."""
    path = SRC.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return frozenset(name for name in names if not name.startswith("_"))


@functools.cache
def is_public(name: str) -> bool:
    """Whether a dotted name is public, or the module of a name that is."""
    modules, objects = documented()
    if any(f"{each}.".startswith(f"{name}.") for each in (*modules, *objects)):
        return True
    if any(f"{name}.".startswith(f"{each}.") for each in objects) or _is_of_pytorch(name):
        return True
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        if module in modules:
            return parts[count] in names_of(module) or parts[count].startswith("__")
    return False


def _is_of_pytorch(name: str) -> bool:
    """Whether a name within the drop-in is one of PyTorch's."""
    for ours, theirs in REPLACED.items():
        if f"{name}.".startswith(f"{ours}."):
            found: object = importlib.import_module(theirs)
            for part in name.removeprefix(ours).split(".")[1:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


@functools.cache
def _private_in_pytorch() -> frozenset[str]:
    """Returns the private names of PyTorch's objects that the drop-in has as well."""
    kinds = [
        torch._C._distributed_rpc.PyRRef,
        torch._C._distributed_rpc.TensorPipeAgent,
        torch._C._distributed_autograd.DistAutogradContext,
    ]
    return frozenset(name for kind in kinds for name in dir(kind) if name.startswith("_"))


def problems_of(source: str) -> list[str]:
    """Returns what a module takes that is not public, with the lines."""
    return [f"line {line}: {what}" for line, what in sorted(set(_problems(ast.parse(source))))]


def _problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    bound = _imports(tree)
    own = _own_private(tree)
    documentation = set(map(id, _docstrings(tree)))
    for name, (line, target) in bound.items():
        if target.partition(".")[0] == "torchweft" and not is_public(target):
            yield line, f"imports {target} as {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = _chain(node) or [""]
            target = ".".join([bound[root][1], *rest]) if root in bound else ""
            package = target.partition(".")[0]
            if package == "torchweft" and not is_public(target):
                yield node.lineno, f"takes {target}"
            elif not (
                _is_allowed(node.attr, own)
                or package not in ("", "tests", "torchweft")
                or (root in ("self", "cls") and len(rest) == 1)
                or _is_of_pytorch(target)
            ):
                yield node.lineno, f"takes the private attribute {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and _chain(node.func) in (["getattr"], ["setattr"]):
            name_node = node.args[1]
            if isinstance(name_node, ast.Constant) and not _is_allowed(name_node.value, own):
                yield node.lineno, f"takes the private attribute {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and id(node) not in documentation:
            yield from ((node.lineno, f"names {each}") for each in _within(node.value))


def _chain(node: ast.expr) -> list[str]:
    """Returns ``["a", "b", "c"]`` for ``a.b.c``, nothing for what begins with no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _is_allowed(attribute: str, own: frozenset[str]) -> bool:
    return (
        not attribute.startswith("_")
        or attribute.startswith("__")
        or attribute in own | OF_OTHERS | _private_in_pytorch()
    )


def _imports(tree: ast.Module) -> dict[str, tuple[int, str]]:
    """Returns the names that imports bind, with their lines and what they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                found[bound] = (node.lineno, alias.name if alias.asname else bound)
                if not alias.asname:
                    found[alias.name] = (node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (node.lineno, f"{node.module}.{alias.name}")
    return found


def _own_private(tree: ast.Module) -> frozenset[str]:
    """Returns the private names that the module's own functions and classes have."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and _chain(node) == ["self", node.attr]:
            found.add(node.attr)
    return frozenset(found)


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _within(text: object) -> Iterator[str]:
    """Yields what a string names, or a program in it imports, and that is not public."""
    if not isinstance(text, str) or "torchweft" not in text:
        return
    for name in _DOTTED.findall(text):
        if not is_public(name):
            yield name
    for line in _IMPORT.findall(text):
        try:
            tree = ast.parse(line)
        except SyntaxError:  # a sentence, or a part of a program
            continue
        yield from (target for _, target in _imports(tree).values() if not is_public(target))
