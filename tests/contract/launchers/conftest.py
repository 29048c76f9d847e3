"""Systems that several files of tests use; each is started once, or its tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.contract.launchers import language_model, sshd
from tests.contract.launchers.commands import TORCHWEFT
from tests.contract.launchers.language_model import LANGUAGE_MODEL
from tests.contract.launchers.resuming import Resumed, trained
from tests.contract.launchers.sshd import Sshd


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A server of ssh, with two hosts."""
    with sshd.running(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """The training that resumes, of which nothing was killed: the same by any launcher."""
    found = trained([*TORCHWEFT, "run", "-n", "2"], tmp_path_factory.mktemp("undisturbed"))
    assert found.begun == [0]
    return found


@pytest.fixture(scope="session")
def perplexities(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The perplexities of ``python train.py`` on this machine."""
    directory = tmp_path_factory.mktemp("script")
    found = language_model.trained([sys.executable, LANGUAGE_MODEL], directory)
    assert found[1] < found[0]
    return found
