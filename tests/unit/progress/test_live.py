"""Tests the display on a terminal, with rich, and text printed while it is shown."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.unit.progress.watched import NEVER_S, OFTEN_S, WORKERS, Watched, run_job
from torchweft.progress import Display, WorkerShare

pytest.importorskip("rich", reason="rows on a terminal are drawn with rich")


@pytest.fixture(autouse=True)
def _is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "30")


def visible(text: str) -> str:
    """Returns ``text`` without control codes."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


class Terminals:
    """Standard output and standard error on one pseudo-terminal.

    A test calls ``become_standard``, not a fixture: pytest replaces the streams before a test
    begins.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, master: int, slave: int) -> None:
        self._monkeypatch = monkeypatch
        self._master = master
        self.stream = os.fdopen(slave, "w")

    def become_standard(self) -> None:
        self._monkeypatch.setattr(sys, "stdout", self.stream)
        self._monkeypatch.setattr(sys, "stderr", self.stream)

    def seen(self) -> str:
        """Closes the stream; returns the text written to it, without control codes."""
        self.stream.close()
        written = b""
        try:
            while part := os.read(self._master, 100_000):
                written += part
        except OSError:  # end of file: the other side is closed
            pass
        return visible(written.decode().replace("\r\n", "\n"))


@pytest.fixture
def terminals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminals]:
    master, slave = pty.openpty()
    made = Terminals(monkeypatch, master, slave)
    yield made
    made.stream.close()
    os.close(master)


def test_rows_change_while_the_caller_is_blocked() -> None:
    out = Watched()
    with Display(total=2, label="epoch", out=out, is_terminal=True, interval_s=OFTEN_S) as shown:
        run_job(shown.work, 1)
        shown.step(loss=0.5)
        shown.work.begun(2, "inner", 8, WORKERS)
        shown.work.started(2, 0, "worker1")
        out.await_text("running: worker0 0  worker1 1")
        seen = visible(out.getvalue())
        assert re.search(r"epoch +\S+ 1/2 .*loss 0.5", seen)
        assert re.search(r"parts of inner +\S+ 0/8 +running: worker0 0", seen)
        shown.work.lost(2, "worker1", [0])
        out.await_text("worker1 was lost; part 0 runs again on another\n")
        assert shown.workers == {
            "worker0": WorkerShare(1, 0.1),
            "worker1": WorkerShare(1, 0.1, is_lost=True),
        }
        assert shown.stragglers() == ()
    end = visible(out.getvalue()).rpartition("\r")[2]
    assert end.startswith("epoch: 1 of 2 steps, 2 parts in ")
    assert end.endswith("; worker0 1 (0.1 s), worker1 1 (0.1 s, lost); 1 rerun\n")


@pytest.mark.parametrize("printed", ["[bold]:smile: {x}\n", "1" * 500 + "\n", "a\nb\n"])
def test_text_that_is_printed_appears_as_it_is(terminals: Terminals, printed: str) -> None:
    terminals.become_standard()
    with Display(interval_s=NEVER_S):
        assert sys.stdout is not terminals.stream
        print(printed, end="")
    assert printed in terminals.seen()
    assert sys.stdout is sys.stderr is terminals.stream


def test_a_forked_process_waits_for_no_lock(terminals: Terminals) -> None:
    terminals.become_standard()
    with Display(interval_s=NEVER_S) as shown:
        assert shown._bars is not None
        with shown._bars.console._lock:  # another thread may hold it at a fork
            thread = threading.Thread(target=fork_and_print)
            thread.start()
            thread.join(30)
        assert not thread.is_alive()
    assert "from the child\n" in terminals.seen()


def fork_and_print() -> None:
    pid = os.fork()
    if pid == 0:
        print("from the child", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)


def test_a_terminal_that_goes_away_stops_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("hung up")

    out = Watched()
    with Display(out=out, is_terminal=True, interval_s=OFTEN_S) as shown:
        run_job(shown.work, 1)
        out.await_text("parts of inner")
        monkeypatch.setattr(out, "flush", fail)
        run_job(shown.work, 2)
    assert shown.workers["worker0"].parts == 2


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    out = Watched()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        Display(out=out, is_terminal=True).__enter__()
    # The rows are erased, the cursor is shown and at their start.
    assert visible(out.getvalue().rpartition("\x1b[2K")[2]) == "\r"


def test_a_second_interrupt_while_it_ends(
    terminals: Terminals, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminals.become_standard()
    shown = Display(interval_s=NEVER_S)

    def interrupt() -> None:
        raise KeyboardInterrupt

    shown.__enter__()
    with monkeypatch.context() as patched:
        patched.setattr(shown._thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shown.__exit__(None, None, None)
    assert sys.stdout is sys.stderr is terminals.stream
    shown._thread.join()
