"""Libraries that use ``torch.distributed.rpc`` can be imported under ``torchweft.compat``.

``tests/unit/compat/used_names.csv`` lists the names that they take from it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 120.0
pytestmark = pytest.mark.timeout(LIMIT_S + 10)

LIBRARIES = [
    "colossalai.legacy.pipeline.rpc",
    "ding",
    "fairscale.experimental.nn.distributed_pipeline",
    "fedml",
    "graphlearn_torch.distributed",
    "lightning.pytorch",
    "machin.parallel.distributed",
    "pippy",
    "syft",
    "tensordict",
    "torch_geometric.distributed",
    "torchopt.distributed",
    "torchrec.distributed",
    "torchrl.collectors.distributed",
]
"""The modules that use it, or the package if all of it is imported at once."""

PROGRAM = """\
import importlib, json, sys
import torch.distributed.rpc as rpc

found = {"rpc": rpc.__name__, "stock": [], "error": "", "is_own": False}
try:
    importlib.import_module(sys.argv[1])
except ImportError as error:
    missing = error.name or ""
    text = f"{type(error).__name__}: {error}"
    is_own = any(each in text for each in ("torch.distributed", "torch._C", "torchweft"))
    found.update(error=text, is_own=is_own)
package = sys.argv[1].partition(".")[0]
stock = "torch.distributed.rpc", "torch.distributed.autograd", "torch._C._distributed"
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == package:
        for key, value in list(getattr(module, "__dict__", {}).items()):
            home = getattr(value, "__module__", None) or ""
            if isinstance(home, str) and home.startswith(stock):
                found["stock"].append(f"{name}.{key}")
print(json.dumps(found))
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_finds_the_names_that_it_imports(library: str, tmp_path: Path) -> None:
    package = library.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torchweft.compat", str(program), library],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rpc"] == "torchweft.compat.rpc"
    assert not found["is_own"], found["error"]
    if found["error"]:
        pytest.skip(f"{library} cannot be imported here: {found['error']}")
    assert found["stock"] == []
