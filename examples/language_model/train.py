"""Trains a language model over several workers: ``python train.py``, or ``make demo``.

``--on`` names the launcher that starts the workers. With ``--inside``, a launcher such as
``torchweft run``, ``torchrun`` or ``srun`` has started this program itself, once for each worker.

The driver, which is this program, starts one server and several trainers, steps them together and
shows their progress. No parameter's gradient passes through it, and it holds parameters only to
create the LSTM and to save and restore the model.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import UnusableState, load_checkpoint, save_checkpoint
from data import Corpus, UnusableText, load_corpus
from interrupt import Interrupt
from progress import ProgressDisplay
from report import History, draw_picture, make_figures, print_table, write_figures
from rich.console import Console
from settings import Options, Settings, parse_options
from synchronous import SynchronousTraining
from workers import UnusableGroup, given_workers, joins_as_driver, started_workers

from torchweft.errors import WeftError


class UnusableFolder(ValueError):
    """The folder for the results cannot be used; the message is for the user."""


@dataclass
class Run:
    """One run of this program.

    Attributes:
        options: Its command line.
        settings: Its settings; a resumed run keeps the settings that it was started with.
        corpus: Its text.
        history: Its figures so far.
        folder: Folder for its results.
        model: The saved model that it resumes from; None for a new run.
        saved_step: Steps done when the state was last saved; None if it never was.
        server: Name of the worker that holds the embedding table and the decoder.
        trainers: Names of the workers that train.
    """

    options: Options
    settings: Settings
    corpus: Corpus
    history: History
    folder: Path
    model: dict[str, Any] | None = None
    saved_step: int | None = None
    server: str = ""
    trainers: list[str] = field(default_factory=list)

    @property
    def state_path(self) -> Path:
        """Path of the saved state."""
        return self.folder / "state.pt"

    def save(self, training: SynchronousTraining) -> None:
        """Saves the state of the run."""
        save_checkpoint(self.state_path, self.settings, self.corpus.words, self.history, training)
        self.saved_step = len(self.history.losses)

    def last_state(self) -> str:
        """Returns a message that says where the last saved state is."""
        if self.saved_step is None:
            return "no state was saved yet"
        path = self.state_path
        return f"the state of step {self.saved_step:,} is in {path}; go on with --resume {path}"


def prepare_run(options: Options) -> Run:
    """Loads the text and the saved state, and makes the folder, before the workers are started.

    Raises:
        UnusableText: The text cannot be trained on.
        UnusableState: The state cannot be resumed.
        UnusableFolder: The folder for the results cannot be written to.
    """
    checkpoint = load_checkpoint(options.resume) if options.resume else None
    settings = checkpoint.settings if checkpoint else options.settings
    corpus = load_corpus(
        None if settings.data is None else Path(settings.data),
        trainers=settings.trainers,
        batch=settings.batch,
        window=settings.window,
        vocabulary_limit=settings.vocabulary,
    )
    folder = make_folder(options.out or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S"))
    if checkpoint is None:
        return Run(options, settings, corpus, History(), folder)
    if checkpoint.words != corpus.words:
        raise UnusableState(f"{options.resume} was made with another text than {corpus.source} now")
    return Run(options, settings, corpus, checkpoint.history, folder, checkpoint.model)


def make_folder(path: Path) -> Path:
    """Creates the folder for the results if it is missing, and checks that it is writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableFolder(f"{path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UnusableFolder(f"{path} cannot be written to")
    return path


def train_on_workers(run: Run, console: Console) -> None:
    """Places the model on the workers and trains it.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C; the state is saved if there was time.
    """
    training = SynchronousTraining(run.server, run.trainers, run.corpus, run.settings)
    if run.model is not None:
        training.load(run.model)
    with Interrupt() as interrupt:
        train(run, training, interrupt, console)
        run.save(training)
    if interrupt.is_requested:
        raise KeyboardInterrupt


def train(run: Run, training: SynchronousTraining, interrupt: Interrupt, console: Console) -> None:
    """Steps until all epochs are done, the time is up, or the user presses Ctrl-C."""
    per_epoch = len(training.rows)
    steps = range(len(run.history.losses), run.options.epochs * per_epoch)
    tokens_per_step = run.settings.batch * run.settings.window
    ends_at = time.monotonic() + 60 * run.options.minutes
    with ProgressDisplay(console, run.trainers, steps, tokens_per_step) as display:
        for step in steps:
            if interrupt.is_requested or time.monotonic() > ends_at:
                break
            report = training.step(training.rows[step % per_epoch])
            run.history.add_step(report)
            display.show_step(report)
            if (step + 1) % per_epoch == 0:
                perplexity = training.held_out_perplexity()
                run.history.add_held_out(perplexity)
                display.show_epoch((step + 1) // per_epoch, perplexity)
                run.save(training)
    if not interrupt.is_requested and not run.history.is_tested():
        run.history.add_held_out(training.held_out_perplexity())


def report(run: Run, wall_s: float, console: Console) -> None:
    """Writes the run's figures and its picture, and prints the table."""
    figures = make_figures(run.settings, run.corpus, run.history, wall_s)
    write_figures(figures, run.folder / "figures.json")
    print_table(console, figures)
    left = "figures.json and state.pt"
    try:
        draw_picture(figures, run.folder / "loss.png")
        left = "loss.png, " + left
    except ImportError:
        advice = "in the clone, pip install '.[demo]'"
        console.print(f"no picture was drawn: matplotlib is missing ({advice})", markup=False)
    console.print(f"{left} are in {run.folder}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    started = time.monotonic()
    console = Console()
    options = parse_options(arguments)
    if options.is_inside and not joins_as_driver():
        return 0
    try:
        run = prepare_run(options)
    except (UnusableText, UnusableState, UnusableFolder) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        count = run.settings.trainers
        workers = given_workers(count) if options.is_inside else started_workers(count, options.on)
        with workers as (run.server, run.trainers):
            train_on_workers(run, console)
    except KeyboardInterrupt:
        print(f"stopped; {run.last_state()}")
        return 130
    except UnusableGroup as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WeftError as error:
        print(f"error: {error}; {run.last_state()}", file=sys.stderr)
        return 1
    report(run, time.monotonic() - started, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
