"""The actions that workers of a pipeline run."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kind of an action; the value is its letter in tables and in the CSV form.

    The backward pass of a stage is one action (``BACKWARD``) or two: the gradients of the stage's
    input (``BACKWARD_INPUT``), which the previous stage waits for, and those of its parameters
    (``BACKWARD_WEIGHT``), which no other worker waits for (Qi et al. 2023, zero bubble).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UPDATE = "U"


KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input part",
    Kind.BACKWARD_WEIGHT: "backward, weight part",
    Kind.UPDATE: "update",
}
"""The kinds in words, for pictures, traces and reports."""


class Weights(enum.Enum):
    """The version of its parameters that a stage uses for a minibatch.

    A stage counts its optimizer steps (``Kind.UPDATE``): version 0 has had none. The backward pass
    of a minibatch uses the version of its forward pass, so a worker keeps several versions.

    Attributes:
        STASHING: The newest version at the time of the forward pass (PipeDream).
        VERTICAL_SYNC: On all stages, the newest version of stage 0 at the time when the minibatch
            entered it (PipeDream).
        DOUBLE_BUFFERED: On all stages version ``max(0, k - 1)``, if the gradients of the minibatch
            go into update ``k``, counted from 0; two versions suffice (PipeDream-2BW).
    """

    STASHING = "stashing"
    VERTICAL_SYNC = "vertical-sync"
    DOUBLE_BUFFERED = "2bw"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a worker: one kind of work of one stage, for one micro-batch.

    Attributes:
        stage: The stage, counted from 0.
        kind: The kind of work.
        microbatch: The micro-batch (in an asynchronous table, the minibatch), counted from 0. An
            update takes in the gradients of all minibatches up to this one that no earlier update
            of the stage took in; with replicas, those of every replica.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"
