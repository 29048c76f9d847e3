from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.traceback import Traceback

from tests.thorough import CHECKED, spread
from torchweft import knobs, secret
from torchweft.errors import ConfigurationError
from torchweft.secret import LEAST_BYTES, MOST_BYTES, SECRET_VARIABLE, Secret, write_new

TEXT = "correct horse battery staple"
SHORT = "hush-hush"
LONG = "hush-hush " * MOST_BYTES


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(knobs.SECRET_FILE.variable, raising=False)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(secret, "_taken_from_environment", None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(f"{TEXT}\n")
    return path


def is_same(one: Secret | None, other: Secret) -> bool:
    return one is not None and other.verify(one.sign(b"words"), b"words")


# Signing


def test_who_has_the_secret_can_sign_and_tell() -> None:
    signature = Secret.from_text(TEXT).sign(b"challenge", b"answer")
    assert len(signature) == 32
    assert Secret(TEXT.encode()).verify(signature, b"challenge", b"answer")


def test_derived_secrets_differ_by_label_and_do_not_sign_for_another() -> None:
    root = Secret.from_text(TEXT)
    assert is_same(root.derive("session"), Secret.from_text(TEXT).derive("session"))
    others = [root, root.derive("store"), root.derive("session").derive("session")]
    assert not any(is_same(root.derive("session"), other) for other in others)
    # A signature that a member can be made to give is not a derived secret.
    assert not is_same(Secret(root.sign(b"session")), root.derive("session"))


# Secrecy


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{0!r}".format, ascii, "%s".__mod__])
def test_it_is_never_shown(show: Callable[[object], str]) -> None:
    assert show(Secret.from_text(TEXT)) == "<Secret, not shown>"


def test_it_holds_nothing_that_is_the_secret() -> None:
    shared = Secret.from_text(TEXT)
    assert not hasattr(shared, "__dict__")
    seen = [getattr(shared, name) for name in Secret.__slots__]
    assert seen
    seen += [getattr(value, name, None) for value in seen for name in dir(value)]
    assert not any(TEXT in repr(value) for value in seen)


def test_it_cannot_be_pickled() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="WEFT_SECRET_FILE"):
            pickle.dumps(Secret.from_text(TEXT), protocol)


def traceback_with_locals(error: BaseException) -> str:
    """Returns an error's traceback with the local variables of all of Weft's frames."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != secret.__file__:
        frame = frame.tb_next
    assert frame is not None
    kind = type(error)
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(Traceback.from_exception(kind, error, frame, show_locals=True))
    plain = traceback.TracebackException(kind, error, frame, capture_locals=True)
    return console.export_text() + "".join(plain.format())


def complaint_of(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    shown = str(caught.value) + traceback_with_locals(caught.value)
    assert "hush" not in shown
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "source"),
    spread(
        [SHORT, LONG, "", "hush\ud800"],
        ["bytes", "text", "a file", "the environment"],
        all_from=CHECKED,
    ),
)
def test_errors_do_not_repeat_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, text: str, source: str
) -> None:
    data = text.encode(errors="surrogatepass")
    path.write_bytes(data)
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), data)
    make = {
        "bytes": lambda: Secret(data),
        "text": lambda: Secret.from_text(text),
        "a file": lambda: Secret.from_file(path),
        "the environment": Secret.from_environment,
    }
    expected = f"it must have from {LEAST_BYTES} to {MOST_BYTES} bytes"
    assert expected in complaint_of(make[source])


def test_an_error_while_signing_does_not_show_it() -> None:
    with pytest.raises(TypeError) as caught:
        Secret.from_text("hush-hush, little baby").sign(b"good", None)  # type: ignore[arg-type]
    shown = traceback_with_locals(caught.value)
    assert "not shown" in shown
    assert "hush" not in shown


# Files


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_file_that_is_open_to_others_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"mode {mode:04o}.*chmod 600 ") as caught:
        Secret.from_file(path)
    assert str(path) in str(caught.value)
    path.chmod(0o400)
    Secret.from_file(path)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody_else = os.stat(path).st_uid + 1
    if os.geteuid() == 0:
        os.chown(path, somebody_else, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        Secret.from_file(path)


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigurationError, match="no plain file"):
            Secret.from_file(path)


# The environment


def test_a_secret_in_the_environment_is_taken_out_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_SECRET", TEXT)
    assert is_same(Secret.from_environment(), Secret.from_text(TEXT))
    assert "WEFT_SECRET" not in os.environ
    assert is_same(Secret.from_environment(), Secret.from_text(TEXT))


def test_programs_that_are_started_then_do_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ.get('WEFT_SECRET'))"]
    monkeypatch.setenv("WEFT_SECRET", TEXT)
    assert subprocess.check_output(show, text=True) == f"{TEXT}\n"
    Secret.from_environment()
    assert subprocess.check_output(show, text=True) == "None\n"


def test_file_and_secret_at_once_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SECRET_FILE", str(path))
    monkeypatch.setenv("WEFT_SECRET", TEXT)
    with pytest.raises(ConfigurationError, match="both WEFT_SECRET_FILE and WEFT_SECRET are set"):
        Secret.from_environment()


@pytest.mark.parametrize("variable", ["WEFT_SECRET_FILE", "WEFT_SECRET"])
def test_an_empty_variable_is_an_error_and_not_no_secret(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigurationError):
        Secret.from_environment()


# New secrets


def test_a_new_secret_is_random_and_only_ones_own(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        write_new(tmp_path / "one")
        write_new(str(tmp_path / "other"))
    finally:
        os.umask(previous)
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600
    assert not is_same(Secret.from_file(tmp_path / "one"), Secret.from_file(tmp_path / "other"))
    assert len((tmp_path / "one").read_text().strip()) == 64


def test_a_new_secret_takes_the_place_of_no_other_file(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is there already"):
        write_new(path)
    assert path.read_text() == f"{TEXT}\n"


def test_a_new_secret_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        write_new(tmp_path / "nowhere" / "secret")
