"""Launchers by name, those of other packages, and errors that say what to do."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import torchweft
from torchweft.cli.main import main
from torchweft.errors import ConfigurationError
from torchweft.launch import launchers
from torchweft.launch.clusters import Cluster
from torchweft.launch.launchers import Launcher, launcher_of, load
from torchweft.launch.run import Order
from torchweft.launch.terms import Terms


class Other(Launcher):
    """A launcher of another package."""

    orders: list[Order] = []  # noqa: RUF012

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        parser.add_argument("--zone", default="a")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Other:
        assert options.zone in "ab"
        return cls()

    def count(self, wanted: int | None) -> int | None:
        return wanted or 3

    def run(self, order: Order) -> int:
        self.orders.append(order)
        return 5

    def cluster(self, terms: Terms) -> Cluster:
        return Cluster(terms)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        assert group == "torchweft.launchers"
        return [
            EntryPoint("other", f"{__name__}:Other", group),
            EntryPoint("gone", "no_such_package_of_a_launcher:It", group),
            EntryPoint("wrong", "os:getcwd", group),
        ]

    monkeypatch.setattr(launchers, "entry_points", entry_points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Other.__module__])
    Other.orders.clear()


@pytest.mark.usefixtures("registered")
def test_another_package_registers_a_launcher() -> None:
    assert load("other") is Other
    assert main(["run", "--on", "other", "--zone", "b", "-m", "package.train", "--on", "x"]) == 5
    (order,) = Other.orders
    assert order.names == ["worker0", "worker1", "worker2"]
    assert order.arguments[-3:] == ["package.train", "--on", "x"]
    assert torchweft.cluster(on="other").names == ["worker0", "worker1", "worker2"]
    assert torchweft.cluster(2, on=Other()).names == ["worker0", "worker1"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "slrm",
            "no launcher 'slrm'; did you mean 'slurm'.*local, ssh, slurm, kubernetes, ray, other",
        ),
        ("gone", "'gone' of package 'no_such_package_of_a_launcher:It' cannot be imported"),
        ("wrong", "'wrong' is .*must be a subclass of torchweft.launch.Launcher"),
    ],
)
def test_launchers_that_cannot_be_used(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        torchweft.cluster(2, on=name)
    assert main(["run", "-n", "2", "--on", name, "train.py"]) == 2
    assert f"torchweft run: launcher {name!r}" in capsys.readouterr().err.replace(
        f"there is no launcher {name!r}", f"launcher {name!r}"
    )


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("ssh --host a", "options of launcher 'ssh': unrecognized arguments: --host a; 'torchweft"),
        ("ssh --hosts 'a", r"on is \"ssh --hosts 'a\", which cannot be read: No closing quotation"),
        ("slurm --nodes many", "options of launcher 'slurm': argument --nodes: invalid int value"),
        ("", "there is no launcher ''"),
    ],
)
def test_texts_that_are_no_launcher(on: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        launcher_of(on)


def test_a_launcher_is_imported_only_when_used() -> None:
    body = (
        "import sys; from torchweft.cli.main import main; import torchweft.launch; "
        "main(['run', '-n', '1', '--on', 'local', '-m', 'this']); "
        "print([name for name in sys.modules if name.startswith('torchweft.launch.') "
        "and name.rpartition('.')[2].partition('_')[0] in "
        "('ssh', 'slurm', 'ray', 'kubernetes', 'hosts')], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] False"
