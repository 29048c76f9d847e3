"""Saves a run so that it can be resumed: the model, its position in the text, the figures."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from report import History
from settings import Settings
from synchronous import SynchronousTraining


class UnusableState(ValueError):
    """A saved state cannot be resumed; the message is for the user."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a step.

    Attributes:
        settings: Its settings.
        words: Its vocabulary.
        history: Its figures so far; the number of losses is the number of steps done.
        model: The result of ``SynchronousTraining.state``.
    """

    settings: Settings
    words: list[str]
    history: History
    model: dict[str, Any]


def save_checkpoint(
    path: Path,
    settings: Settings,
    words: list[str],
    history: History,
    training: SynchronousTraining,
) -> None:
    """Writes the state of a run; replaces an existing file only once the new one is complete."""
    state = {
        "settings": asdict(settings),
        "words": words,
        "history": history.state(),
        "model": training.state(),
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a state that ``save_checkpoint`` wrote.

    Raises:
        UnusableState: The file cannot be read, or is not such a state.
    """
    try:
        state = torch.load(path, weights_only=True)  # tensors and plain values, no code
        return Checkpoint(
            settings=Settings(**state["settings"]),
            words=state["words"],
            history=History.from_state(state["history"]),
            model=state["model"],
        )
    except OSError as error:
        raise UnusableState(f"{path} cannot be read: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise UnusableState(f"{path} is not a state that this program saved") from error
