"""The commands of the manual's pages do what the pages show."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S, run_apart
from tests.pages import assert_alike, programs_of, text_of, write_programs

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_the_quick_start_prints_what_its_page_shows(tmp_path: Path) -> None:
    first, _ = write_programs("docs/quickstart.md", tmp_path)
    assert_alike(run_apart(first.name, folder=tmp_path), first.printed or "")


def shown_with(page: str, command: str) -> tuple[list[str], list[str]]:
    """Returns the arguments of a command on a page, and the lines that the page shows below."""
    found = re.search(
        rf"^\$ torchweft ({command}.*)\n```\n.*?^```text\n(.*?)^```$",
        text_of(page),
        re.M | re.S,
    )
    assert found is not None
    return found[1].split(), found[2].splitlines()


def torchweft(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchweft", *arguments],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("page", ["docs/quickstart.md", "docs/restarting.md"])
def test_a_script_under_the_launcher_prints_what_its_page_shows(page: str, tmp_path: Path) -> None:
    write_programs(page, tmp_path)
    arguments, lines = shown_with(page, "run")
    ended = torchweft(tmp_path, *arguments)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in lines if line.startswith("[") and " weft: " not in line]
    assert_alike(ended.stdout, "\n".join(said))
    assert_alike(told_by_launcher(ended.stderr.splitlines()), told_by_launcher(lines))


def told_by_launcher(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line.startswith(("torchweft run: ", "    ")))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_workers_meet_with_the_secret_and_the_certificates_of_the_page(tmp_path: Path) -> None:
    write_programs("docs/quickstart.md", tmp_path)
    text = text_of("docs/securing.md")
    (script,) = re.findall(r"^```bash\n# certificates.sh\n(.*?)^```$", text, re.M | re.S)
    subprocess.run(
        ["bash", "-c", script, "certificates.sh", "node0", "node1"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert torchweft(tmp_path, "secret", "new", "group.secret").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    workers = [
        subprocess.Popen(
            [sys.executable, "joined.py"],
            cwd=tmp_path,
            env={
                **os.environ,
                "WEFT_SECRET_FILE": "group.secret",
                "WEFT_TLS_CERT": f"node{rank}.pem",
                "WEFT_TLS_KEY": f"node{rank}.key",
                "WEFT_TLS_CA": "authority.pem",
                "WEFT_WORKER_NAME": f"worker{rank}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert said[0] == "[2.0, 2.0]\n"


def test_every_program_of_the_quick_start_is_run_here() -> None:
    names = [each.name for each in programs_of("docs/quickstart.md")]
    assert names == ["quickstart.py", "joined.py"]
