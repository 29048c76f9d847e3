"""Tests the bootstrap in child processes, with a fake torch and Weft to start as fast as Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchweft.compat.installing import FOLDER

FILES = {
    "torch/__init__.py": "import torch.part\nprint('torch', end=' ')\n",
    "torch/part.py": "",
    "torchweft/__init__.py": "",
    "torchweft/rpc.py": "import torch\nimport torchweft.agent\nprint('torchweft.rpc', end=' ')\n",
    "torchweft/agent.py": "import torch\n",
    "torchweft/compat/__init__.py": (
        "def install():\n"
        "    import sys, torchweft.rpc, torchweft.agent\n"
        "    hooks = [f for f in sys.meta_path if type(f).__module__ == 'sitecustomize']\n"
        "    print('installed', hooks, end=' ')\n"
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs a program with the bootstrap; ``changes`` adds, replaces or (with None) omits files."""

    def start(program: str, folder: str = FOLDER, **changes: str | None) -> tuple[str, str]:
        for name, content in {**FILES, **changes}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_text(content)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(tmp_path)])}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return start


def test_a_program_without_torch_pays_nothing(run: Any, tmp_path: Path) -> None:
    program = "import sys; print(*sys.modules); print(*sys.path, sep=',')"
    loaded, path = run(program)[0].splitlines()
    nothing = str(tmp_path / "nothing")
    loaded_without, path_without = run(program, folder=nothing)[0].splitlines()
    assert path == path_without.replace(f"{nothing},", "")
    assert set(loaded.split()) - set(loaded_without.split()) == {"__future__"}


def test_it_is_installed_when_torch_is_complete(run: Any) -> None:
    out, err = run(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch').name == 'torch'\n"  # finds, without an import
        "import torch\n"
        "print(vars(torch.__spec__.loader).keys() - {'name', 'path'}, torch.__spec__.name)\n"
    )
    assert (out, err) == ("torch torchweft.rpc installed [] set() torch\n", "")


def test_a_module_of_weft_that_imports_torch_is_complete_as_well(run: Any) -> None:
    assert run("import torchweft.rpc") == ("torch torchweft.rpc installed [] ", "")
    assert run("import torchweft.compat, torchweft.agent") == (
        "torch torchweft.rpc installed [] ",
        "",
    )


def test_a_torch_that_could_not_be_imported_is_waited_for(run: Any) -> None:
    flaky = "import os\nif 'GOOD' not in os.environ: raise ValueError\nprint('torch', end=' ')\n"
    program = (
        "import os\n"
        "try: import torchweft.agent\n"
        "except ValueError: os.environ['GOOD'] = '1'\n"
        "import torch\n"
    )
    assert run(program, **{"torch/__init__.py": flaky})[0] == "torch torchweft.rpc installed [] "


def test_a_module_of_weft_that_fails_does_not_keep_it_from_being_installed(run: Any) -> None:
    program = "try: import torchweft.broken\nexcept ValueError: print('caught')"
    broken = {"torchweft/broken.py": "import torch\nraise ValueError\n"}
    assert run(program, **broken)[0] == "torch torchweft.rpc installed [] caught\n"


def test_the_users_own_customization_is_run(run: Any, tmp_path: Path) -> None:
    own = {"sitecustomize.py": "import torch\nNAME = 'own'\n"}
    program = "import sys, sitecustomize\nprint(sitecustomize.NAME, sitecustomize.__file__)"
    path = tmp_path / "sitecustomize.py"
    assert run(program, **own) == (f"torch torchweft.rpc installed [] own {path}\n", "")


def test_a_mistake_in_the_users_customization_is_told_as_ever(run: Any) -> None:
    _, err = run("pass", **{"sitecustomize.py": "import nothing_of_that_name\n"})
    assert err.startswith("Error in sitecustomize;")
    assert "No module named 'nothing_of_that_name'" in err


def test_a_python_without_weft_says_so(run: Any) -> None:
    program = "import sys\nsys.modules['torchweft'] = None\nimport torch\nprint(sys.executable)"
    out, err = run(program)
    assert out.startswith("torch ")
    assert "cannot import torchweft: here torch.distributed.rpc is PyTorch's" in err


def test_imports_of_several_threads_end_with_one_installation(run: Any) -> None:
    slow = "import time\ntime.sleep(0.05)\nprint('torch', end=' ')\n"
    program = (
        "import importlib, threading\n"
        "names = ['torch', 'torchweft.rpc', 'torchweft.agent', 'torch']\n"
        "threads = [threading.Thread(target=importlib.import_module, args=[n]) for n in names]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    out, err = run(program, **{"torch/__init__.py": slow})
    assert (out, err) == ("torch torchweft.rpc installed [] ", "")
