from __future__ import annotations

from pathlib import Path

import pytest

from torchweft.cli import top
from torchweft.cli.main import USAGE_STATUS, main
from torchweft.cli.run import INTERRUPTED_STATUS
from torchweft.secret import Secret


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line printed for a wrong command line."""
    try:
        status: object = main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == USAGE_STATUS
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND; see torchweft --help"),
        ("fly", "invalid choice: 'fly'"),
        ("run train.py -n 2", "torchweft run -n 2 train.py; options go before the script"),
        ("manifest --image x t.py", "torchweft manifest -n 2 train.py; options go before"),
        ("run -n 0 train.py", "number of workers is 0; it must be at least 1"),
        ("run -n two train.py", "invalid int value: 'two'"),
        ("run -n 2", "there is no script; write: torchweft run -n 2 train.py"),
        ("run -n 2 -m", "no module after -m; write: torchweft run -n 2 -m package.train"),
        ("run -n 2 no/such.py", "there is no script 'no/such.py' in "),
        ("run -n 2 .", "'.' is a directory; name the script in it"),
        ("run -n 2 --names a,,b train.py", "a worker name is empty in 'a,,b'"),
        ("run --names a,b,a train.py", "worker name 'a' is given twice"),
        ("run -n 2 --names a,b,c train.py", "3 names for 2 workers"),
        ("manifest --image x -n 2", "there is no script; write: torchweft manifest -n 2 train.py"),
        ("top --jsn", "torchweft top: unrecognized arguments: --jsn; see torchweft top --help"),
        ("top --once --web", "--once prints once, and --web serves a page: omit one"),
        ("top --waits --worker a", "--waits is of all workers, and --worker of one: omit one"),
        ("top --once --port 80", "--host and --port are for the page: add --web"),
        ("run -n 2 --master-port 70000 train.py", "a port is a number from 1 to 65535"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert message in usage_error(capsys, *arguments.split())


# The subcommand ``secret``


def test_a_new_secret_is_made_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "group.secret"
    assert main(["secret", "new", str(path)]) == 0
    Secret.from_file(path)
    printed = capsys.readouterr()
    assert f"WEFT_SECRET_FILE={path}" in printed.out
    assert path.read_text().strip() not in printed.out + printed.err


def test_ctrl_c_ends_a_command_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "run_doctor", interrupted)
    assert main(["doctor"]) == INTERRUPTED_STATUS
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
