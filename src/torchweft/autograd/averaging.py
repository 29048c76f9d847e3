"""What ``DistributedDataParallel`` averages in one backward pass on one worker, and when.

Gradients of modules under DDP are not given to the context as they come, but summed up. When no
component can add to those of a module any more, they are averaged, see ``ddp.py``. Until then
the messages that lead to the module do not count as executed, so the pass does not end.

Rules of the file: modules take turns in an order that is the same on all ranks, or their
collectives would not match. Nothing that another worker waits for waits for an average, or two
ranks might wait for each other: gradients for others are sent first.
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
    """Returns what is to be averaged in a pass on this worker, if anything.

    Args:
        components: For each message sent from here, live or not, and the roots: what is reached
            together with it. Those of one component are the same objects.
        gradients: Take the averages.
        sink: Takes the gradients of all other leaves; by default ``gradients`` do.

    Raises:
        AutogradError: DDP is used in a way that is not supported.
    """
    known = known_modules()
    if not known:
        return None
    components = list({id(sends): (reached, sends) for reached, sends in components}.values())
    # The module that was made last is usually the first to have all its gradients.
    turns = [_Turn(Replica(module, lock), components) for module, lock in reversed(known)]
    turns = [turn for turn in turns if turn.open]
    return Averaging(gradients, sink or gradients.add_all, turns) if turns else None


class Averaging:
    """The modules under DDP that a backward pass reaches. One thread at a time may use it.

    Args:
        gradients: Take the averages.
        sink: Takes the gradients of leaves that are not averaged.
        turns: The modules, in their order.

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
        """Takes the gradients of leaves in place of the context, and keeps those to average."""
        pairs, borrowed = list(pairs), list(borrowed)
        kept = [pair for pair in pairs if pair[0] in self._replicated]
        others = [pair for pair in pairs if pair[0] not in self._replicated]
        self._sums.add_all(kept, borrowed)
        self._sink(others, [*borrowed, *[gradient for _, gradient in kept]])

    def hold_back(self, progress: Progress, is_settled: bool, live: Mapping[int, object]) -> None:
        """Removes from ``progress`` that messages ran which lead to what is not averaged.

        Args:
            progress: What this worker did since the last time.
            is_settled: Whether all live messages are known.
            live: They, as far as they are known.
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
        """Whether a module has all its gradients, and none before it is missing some."""
        return bool(self._turns) and not self._turns[0].open

    def run(self) -> Progress:
        """Averages the modules whose turn it is. Blocks until all their ranks have come to it.

        Returns:
            The messages that have run now.

        Raises:
            AutogradError: DDP could not do it for these gradients.
            RuntimeError: The collective failed.
        """
        while self.is_due:
            self._turns[0].replica.average(self._sums, self._gradients)
            self._turns = self._turns[1:]
        if not self._turns:
            self._sums.clear()
        return Progress(executed=self._take_released())

    def close(self) -> None:
        """Gives up what has not been averaged."""
        for turn in self._turns:
            turn.replica.give_up()
        self._turns = ()


class _Turn:
    """One module in one pass.

    Attributes:
        replica: The module.
        message_ids: Messages, live or not, that lead to some of its parameters.
        open: The same by component, as far as gradients may still come of it.
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
        """Notes that components have run, or that those without a live message never will."""
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
