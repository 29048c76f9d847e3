"""Decides what ``DistributedDataParallel`` averages in a backward pass on one worker, and when.

Gradients of modules under DDP do not go to the context at once, but are summed. When no component
can add to a module's gradients any more, they are averaged; see ``ddp.py``. Until then the
messages that lead to the module do not count as executed, so the pass does not end.

Rules of the file: modules take turns in the same order on all ranks; otherwise their collectives
would not match. Work that another worker waits for never waits for an average, or two ranks might
wait for each other: gradients for other workers are sent first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from torchweft.autograd.component import Live
from torchweft.autograd.ddp import Replica, known_modules
from torchweft.autograd.gradients import Gradients, Sink
from torchweft.autograd.walk import Reached
from torchweft.errors import AutogradError
from torchweft.protocol.backward import Progress

Components = Iterable[tuple[Reached, Sequence[Live]]]


def find_averaging(
    components: Components, gradients: Gradients, sink: Sink | None = None
) -> Averaging | None:
    """Returns the averaging that a pass needs on this worker; None if it needs none.

    Args:
        components: An item for each message sent from here, live or not, and for the roots: its
            component. Items of one component hold the same objects.
        gradients: Receives the averages.
        sink: Receives the gradients of all other leaves; by default ``gradients`` does.

    Raises:
        AutogradError: DDP is used in a way that is not supported.
    """
    known = known_modules()
    if not known:
        return None
    components = list({id(sends): (reached, sends) for reached, sends in components}.values())
    # The module that was constructed last usually has all its gradients first.
    turns = [_Turn(Replica(module, lock), components) for module, lock in reversed(known)]
    turns = [turn for turn in turns if turn.open]
    return Averaging(gradients, sink or gradients.add_all, turns) if turns else None


class Averaging:
    """The modules under DDP that a backward pass reaches. One thread at a time may use it.

    Args:
        gradients: Receives the averages.
        sink: Receives the gradients of leaves that are not averaged.
        turns: The modules, in order.

    Raises:
        AutogradError: DDP is used in a way that is not supported.
    """

    def __init__(self, gradients: Gradients, sink: Sink, turns: Sequence[_Turn]) -> None:
        self._gradients = gradients
        self._sink = sink
        self._turns = turns
        self._replicated = _all_parameters([turn.replica for turn in turns])
        self._sums = Gradients()
        self._held: list[int] = []
        for turn in turns:
            turn.replica.check_use()
        for turn in turns:
            turn.replica.prepare()

    def add_all(self, pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
        """Receives the gradients of leaves in place of the context; keeps those to average."""
        pairs, borrowed = list(pairs), list(borrowed)
        kept = [pair for pair in pairs if pair[0] in self._replicated]
        others = [pair for pair in pairs if pair[0] not in self._replicated]
        self._sums.add_all(kept, borrowed)
        self._sink(others, [*borrowed, *[gradient for _, gradient in kept]])

    def hold_back(self, progress: Progress, is_settled: bool, live: Mapping[int, object]) -> None:
        """Removes executed messages from ``progress`` while they lead to unaveraged modules.

        Args:
            progress: This worker's progress since the last call.
            is_settled: Whether all live messages are known.
            live: The live messages that are known.
        """
        executed = set(progress.executed)
        for turn in self._turns:
            turn.close_components(executed, is_settled, live)
        self._held += progress.executed
        progress.executed = self._take_released()

    def _take_released(self) -> list[int]:
        awaited = {number for turn in self._turns for number in turn.message_ids}
        released = [number for number in self._held if number not in awaited]
        self._held = [number for number in self._held if number in awaited]
        return released

    @property
    def is_due(self) -> bool:
        """Whether the module whose turn is next has all its gradients."""
        return bool(self._turns) and not self._turns[0].open

    def run(self) -> Progress:
        """Averages the modules that are due. Blocks until all their ranks do the same.

        Returns:
            The messages that count as executed now.

        Raises:
            AutogradError: DDP cannot average these gradients.
            RuntimeError: The collective failed.
        """
        while self.is_due:
            self._turns[0].replica.average(self._sums, self._gradients)
            self._turns = self._turns[1:]
        if not self._turns:
            self._sums.clear()
        return Progress(executed=self._take_released())

    def close(self) -> None:
        """Gives up modules that have not been averaged."""
        for turn in self._turns:
            turn.replica.give_up()
        self._turns = ()


class _Turn:
    """One module in one pass.

    Attributes:
        replica: The module.
        message_ids: Messages, live or not, that lead to some of its parameters.
        open: The same by component, for components that may still yield gradients.
    """

    def __init__(self, replica: Replica, components: Components) -> None:
        self.replica = replica
        self.open = [
            frozenset([send.message_id for send in sends])
            for reached, sends in components
            if not replica.parameters.isdisjoint(reached.leaves.values())
        ]
        self.message_ids = frozenset().union(*self.open)

    def close_components(
        self, executed: set[int], is_settled: bool, live: Mapping[int, object]
    ) -> None:
        """Closes components that have run, and once settled, those without a live message."""
        self.open = [
            message_ids
            for message_ids in self.open
            if message_ids.isdisjoint(executed)
            and not (is_settled and message_ids.isdisjoint(live))
        ]


def _all_parameters(replicas: Sequence[Replica]) -> frozenset[Tensor]:
    parameters = frozenset[Tensor]().union(*[replica.parameters for replica in replicas])
    if len(parameters) < sum(len(replica.parameters) for replica in replicas):
        raise AutogradError(
            "two DistributedDataParallel modules have a parameter in common; wrap it once"
        )
    return parameters
