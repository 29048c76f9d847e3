"""Tests that ``tests/contract`` knows only what is public, and that a module which does not fails.

The tests there stay as they are when the engine is written anew, so they must not know it.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.public import ROOT, is_public, problems_of

CONTRACT = ROOT / "tests" / "contract"

HARNESS = {
    "tests.command_line": "runs the command in this process",
    "tests.conformance.shims": "what only PyTorch's own tests use, made of parts of the engine",
    "tests.far_workers": "sets two constants, so that tensors cross connections between hosts",
    "tests.leaks": "looks at two switches of the process",
    "tests.remains": "asks a worker what it still keeps",
}
"""Modules that tests of the contract use and that look inside of Weft, with what for.

The engine's next author adapts these, and no test of the contract.
"""


def imported(source: str) -> set[str]:
    """Returns the names that a module imports from ``tests``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.startswith("tests.")}


def module_of(name: str) -> str:
    """Returns the module of a name: the name itself, or the one that it is in."""
    return name if path_of(name).exists() else name.rpartition(".")[0]


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def modules() -> dict[str, str]:
    """Returns the sources of the contract and of all that it imports, but for the harness."""
    ahead = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files()]
    found: dict[str, str] = {}
    while ahead:
        name = ahead.pop()
        if name not in found and name not in HARNESS and path_of(name).exists():
            found[name] = path_of(name).read_text()
            ahead += map(module_of, imported(found[name]))
    return found


def files() -> list[Path]:
    return [path for path in CONTRACT.rglob("*.py") if path.name != "__init__.py"]


def test_the_contract_knows_only_what_is_public() -> None:
    found = {name: problems_of(source) for name, source in modules().items()}
    told = [f"{name}, {each}" for name in sorted(found) for each in found[name]]
    assert not told, "\n".join(told)


def test_there_is_a_contract_and_its_harness_is_used() -> None:
    sources = modules()
    assert len(files()) > 200
    used = {name for source in sources.values() for name in imported(source)}
    assert set(HARNESS) <= used | {module_of(name) for name in used}
    assert "tests.inside" in sources, "imports are followed beyond the folder"


@pytest.mark.parametrize(
    "source",
    [
        "from torchweft.engine.worker.current import current",
        "from torchweft import engine",
        "import torchweft.engine.io.link",
        "import torchweft.engine.io.link as link",
        "import torchweft\ntorchweft.engine.threads.reactor.Reactor()",
        "import torchweft as weft\nweft.rpc.worker.current_worker()",
        "from torchweft import rpc\nrpc.worker",
        "from torchweft import knobs",
        "from torchweft.rpc import current_worker",
        "def f():\n    from torchweft.engine.wire import frames",
        "from torchweft import rpc\nrpc._late",
        "from torchweft.launch import Cluster\nCluster._join",
        "from torchweft.pipeline import Pipe\npipe = Pipe()\npipe._deployment",
        "def f(pipe):\n    return pipe.host._runs",
        "def f(pipe):\n    return getattr(pipe, '_runs')",
        "def f(patch):\n    patch.setattr('torchweft.launch.job.LIMIT_S', 1)",
        "PROGRAM = '''\nfrom torchweft.engine.worker.current import current\ncurrent()\n'''",
        "PROGRAM = 'import torchweft.engine.worker'",
        "from torchweft.compat import rpc\nrpc.no_name_of_pytorch",
        "from torchweft.compat.rpc.references import RRef",
    ],
)
def test_what_is_not_public_is_found(source: str) -> None:
    assert problems_of(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Tests of torchweft.engine.worker."""',
        "import torchweft as weft\nweft.rpc.rpc_sync\nweft.errors.WorkerLost.__name__",
        "from torchweft import rpc, secret\nrpc.health()\nsecret.Secret.read",
        "from torchweft.errors import WorkerLost",
        "from torchweft.rpc import functions",
        "from torchweft.compat import rpc\nrpc.api._wait_all",
        "import os, torch\nos._exit(1)\ntorch._C",
        "class A:\n    def _b(self):\n        self._c = A()._b()._c",
        "PROGRAM = 'import torchweft.rpc; from torchweft import rpc'",
    ],
)
def test_what_is_public_is_left_alone(source: str) -> None:
    assert not problems_of(source)


def test_public_is_what_the_reference_documents() -> None:
    assert is_public("torchweft.observe.group.find")
    assert is_public("torchweft.pipeline.schedules")
    assert not is_public("torchweft.observe.group.addresses")
    assert not is_public("torchweft.knobs.SPIN_S")
