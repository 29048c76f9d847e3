"""The whole display, with events that are made up and a thread that is real.

Nothing waits for a time to pass: a test waits until the text that it expects was written.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest

from torchweft.errors import ConfigurationError
from torchweft.mapreduce.display import WorkerShare, progress
from torchweft.mapreduce.display.showing import can_change_lines
from torchweft.mapreduce.observers import observers

WORKERS = ["worker0", "worker1"]
WAIT_S = 30.0
OFTEN_S = 0.002
NEVER_S = 1e6


class Watched(io.StringIO):
    """A stream that one can wait for a text on."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        with self._changed:
            self._changed.notify_all()
            return super().write(text)

    def await_text(self, text: str) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: text in self.getvalue(), WAIT_S)
        assert came, f"{text!r} is not in {self.getvalue()!r}"


@pytest.fixture(autouse=True)
def _is_wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "30")
    yield
    assert observers._observers == ()


def run_map(map_id: int, slow_s: float = 0.1) -> None:
    observers.begun(map_id, "inner", 2, WORKERS)
    for part, seconds in ((0, 0.1), (1, slow_s)):
        observers.started(map_id, part, WORKERS[part])
        observers.ended(map_id, part, WORKERS[part], seconds)
    observers.done(map_id, None)


def test_lines_change_on_a_terminal_while_the_caller_is_blocked() -> None:
    out = Watched()
    with progress(total=2, label="epoch", out=out, is_terminal=True, interval_s=OFTEN_S) as shown:
        run_map(1)
        shown.step(loss=0.5)
        observers.begun(2, "inner", 8, WORKERS)
        observers.started(2, 0, "worker1")
        out.await_text("parts 0/8 of inner  running: worker0 0  worker1 1")
        assert "epoch 1/2" in out.getvalue()
        assert "loss 0.5" in out.getvalue()
        observers.lost(2, "worker1", [0])
        out.await_text("worker1 was lost; part 0 runs again on another\n")
        assert shown.workers == {
            "worker0": WorkerShare(1, 0.1),
            "worker1": WorkerShare(1, 0.1, is_lost=True),
        }
        assert shown.stragglers() == ()
    end = out.getvalue().rsplit("\x1b[J", 1)[1]
    assert end.startswith("epoch: 1 of 2 steps, 2 parts in ")
    assert end.endswith(
        "; worker0 1 (0.1 s), worker1 1 (0.1 s, lost); 1 rerun; "
        "slowest worker0: 0.1 s a part, median 0.1 s\n"
    )


def test_a_log_gets_plain_lines() -> None:
    out = Watched()
    with progress(label="epoch", out=out, interval_s=OFTEN_S) as shown:
        run_map(1)
        shown.step()
        out.await_text("parts 2/2 of inner\n")
        run_map(2, slow_s=7.0)
        observers.begun(3, "inner", 2, WORKERS)
        observers.lost(3, "worker0", [0, 1])
        out.await_text("run again on others\n")
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines.count("worker1 is behind: part 1 of inner for 7.0 s (median 0.1 s)") == 1
    assert lines.count("worker0 was lost; parts 0, 1 run again on others") == 1
    assert lines[-1].startswith("epoch: 1 step, 4 parts in ")


def test_a_log_is_not_told_the_same_again() -> None:
    out = Watched()
    with progress(label="epoch", out=out, interval_s=OFTEN_S) as shown:
        shown.step()
        out.await_text("epoch 1")
        observers.begun(1, "inner", 2, WORKERS)
        out.await_text("parts 0/2 of inner\n")
        shown._log()
    assert out.getvalue().count("parts 0/2 of inner\n") == 1


def test_a_log_line_comes_no_more_often_than_asked_for() -> None:
    out = Watched()
    with progress(out=out, interval_s=NEVER_S) as shown:
        run_map(1)
        shown.step()
        shown._update()
    assert len(out.getvalue().splitlines()) == 1


def test_what_happened_last_is_told_at_the_end() -> None:
    out = Watched()
    with progress(out=out, is_terminal=True, interval_s=NEVER_S):
        observers.begun(1, "inner", 2, WORKERS)
        observers.lost(1, "worker0", [0, 1])
    assert out.getvalue().startswith(
        "worker0 was lost; parts 0, 1 run again on others\nmaps: 1 map"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_error_goes_on_and_is_named(is_terminal: bool) -> None:
    out = Watched()

    def train() -> None:
        with progress(total=7, out=out, is_terminal=is_terminal, interval_s=NEVER_S) as shown:
            shown.step(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert out.getvalue().startswith("maps stopped by KeyboardInterrupt: 3 of 7 steps, 0 parts in ")
    assert "weft-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_second_interrupt_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Watched()
    shown = progress(out=out, is_terminal=True, interval_s=OFTEN_S)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with shown:
        run_map(1)
        out.await_text("parts 2/2 of inner")
        join = shown._thread.join
        monkeypatch.setattr(shown._thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shown.__exit__(None, None, None)
        assert out.getvalue().endswith("\r\x1b[J")
        monkeypatch.setattr(shown._thread, "join", join)


def test_maps_and_steps_of_several_threads() -> None:
    out = Watched()
    with progress(out=out, interval_s=OFTEN_S) as shown:

        def loop(number: int) -> None:
            for step in range(50):
                run_map(1000 * number + step)
                shown.step(loss=0.1)

        threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert out.getvalue().splitlines()[-1].startswith("maps: 200 steps, 400 parts in ")
    assert {name: share.parts for name, share in shown.workers.items()} == {
        "worker0": 200,
        "worker1": 200,
    }


def test_two_displays_see_the_same() -> None:
    with progress(out=io.StringIO()) as one, progress(out=io.StringIO()) as two:
        run_map(1)
    assert one.workers == two.workers != {}


def test_a_stream_that_is_closed_stops_no_program(caplog: pytest.LogCaptureFixture) -> None:
    out = Watched()
    with progress(out=out, interval_s=OFTEN_S) as shown:
        out.close()
        run_map(1)
        shown.step()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert shown.workers["worker0"].parts == 1


def test_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert can_change_lines(Terminal())
    assert not can_change_lines(io.StringIO())
    assert not can_change_lines(object())  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "dumb")
    assert not can_change_lines(Terminal())


def test_arguments_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="total is -1: pass how many steps"):
        progress(total=-1)
    with pytest.raises(ConfigurationError, match="interval_s is 0: pass a number of seconds"):
        progress(interval_s=0)
