"""Runs a worker's row of a table, in one thread with a mailbox.

Messages of other workers are put into the mailbox by the threads that read connections. Only the
runner's own thread takes them out, and only it runs stages.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.arguments import kind_of
from torchweft.errors import PipelineError, ProtocolError, WeftError, WorkerLost
from torchweft.extending import (
    Member,
    device_mark,
    find_worker,
    ports,
    served_streams,
    waiting,
    working_for,
)
from torchweft.pipeline.copies import WeightCopies, added, separated
from torchweft.pipeline.finite import CheckedStage
from torchweft.pipeline.recording import Notes
from torchweft.pipeline.schedules import Action, Kind, SchedulePipeDream, Table
from torchweft.pipeline.stage import Leaves, Objective, StageRun
from torchweft.pipeline.wiring import BATCH, Packet, Wiring, describe_packets
from torchweft.reports import Wait
from torchweft.rpc import RRef, on_worker_lost

FORWARD, BACKWARD, COPIES = range(3)
"""The kinds of messages between stages."""

_HEAD = struct.Struct("<qBiiqQ?")
"""Step, kind, stage, source, micro-batch and mask of a message, and whether its first value is the
structure of the others."""
_MASK_LIMIT = 1 << 64
START = (-1,)
"""The key of the command to run a row."""
_END, _MESSAGE = -1, -2
"""In place of a step: the end of the runner, and a message that was not read yet."""
_SHOWN = {FORWARD: "the values", BACKWARD: "the gradients"}

Waits = Callable[[], Sequence[Wait]]
Key = tuple[int, ...]
"""Kind, stage, source and micro-batch of a message."""


WAIT_S = 60.0
"""How long stages wait for one another by default, and calls of a pipeline at least."""
OptimizerMaker = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes the optimizer of one worker's weights."""


class Settings(NamedTuple):
    """The settings of a pipeline that do not depend on where its stages are.

    Attributes:
        loss: The loss function.
        checkpoint: When activations are dropped and computed again.
        is_mean: Whether the loss of a batch is the mean over its micro-batches.
        limit_s: How long a stage waits for a value of another stage.
        maker: Makes the optimizers that an asynchronous schedule steps.
        check_finite: Whether stages look for NaN and infinity.
    """

    loss: Callable[[Any, Any], Tensor] | None
    checkpoint: str
    is_mean: bool
    limit_s: float
    maker: OptimizerMaker | None
    check_finite: bool

    @property
    def answer_s(self) -> float:
        """How long to wait for a worker that sets up its stages, or reads or writes their state."""
        return max(self.limit_s, WAIT_S)


@dataclass(frozen=True)
class Assignment:
    """What one worker of a pipeline needs to know.

    Attributes:
        pipe: Number of the pipeline, unique in the group; that of its port on each worker.
        worker: The worker's row.
        workers: The names of all workers, by row.
        table: The table.
        wiring: The values between the stages.
        stages: By number, a function that makes the stage's module, or the module.
        copies: The weights that exist more than once.
        driver: The name of the driver.
        has_names: Whether the names in a stage are unique in the pipeline; otherwise the number of
            the stage goes before them.
        endless: Makes the rows of an asynchronous pipeline; None for a synchronous one. The table
            is then only for forwards without gradients.
        settings: The settings of the pipeline.
    """

    pipe: int
    worker: int
    workers: tuple[str, ...]
    table: Table
    wiring: Wiring
    stages: Mapping[int, Callable[[], nn.Module] | nn.Module]
    copies: WeightCopies
    driver: str
    has_names: bool
    endless: SchedulePipeDream | None
    settings: Settings

    @property
    def divisor(self) -> int:
        """The number that each loss is divided by."""
        is_divided = self.settings.is_mean and self.endless is None
        return self.table.n_microbatches if is_divided else 1


class StartCommand(NamedTuple):
    """A command: run the row once.

    Attributes:
        step: Number of the step.
        is_training: Whether to run backwards as well.
        zero_grad: Whether gradients become None first, or zeros; None: they stay.
        inputs: By stage and micro-batch, what the stage takes of the batch.
        targets: By micro-batch, its target, for the last stage.
        reports: Gets the losses of an asynchronous run, at the driver.
        done: Gets the result.
        mark: Marks the end of the GPU work that computes inputs and targets.
        served: The call of the driver, which the row answers.
    """

    step: int
    is_training: bool
    zero_grad: bool | None
    inputs: Mapping[int, Mapping[int, Sequence[Any]]]
    targets: Mapping[int, Any]
    reports: RRef[Any] | None
    done: torch.futures.Future[Any]
    mark: Callable[..., None]
    served: object


class Aborted(Exception):
    """The driver has ended the step."""


class Runner:
    """Runs the stages of one worker, in a thread of its own.

    Args:
        assignment: What it runs.
    """

    unit = "micro-batch"
    """The name, in messages, of that which goes through the stages."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.name = assignment.workers[assignment.worker]
        table, wiring = assignment.table, assignment.wiring
        last, loss = table.n_stages - 1, assignment.settings.loss
        self.stages = {
            stage: self._make_stage(
                stage,
                self._made(stage, made),
                wiring,
                Objective(loss, assignment.divisor) if stage == last and loss is not None else None,
                self._checkpoints,
            )
            for stage, made in separated(assignment.stages).items()
        }
        self.optimizer: torch.optim.Optimizer | None = None
        self.peak_held = 0
        self.peak_versions = 1
        self.notes: Notes | None = None
        self._row = table.rows[assignment.worker]
        self._peers: list[Any] = [find_worker(name) for name in assignment.workers]
        self._peer_by_seat = {seat: self._peers[worker] for seat, worker in table.seats.items()}
        self._ports = ports()
        self._mail: queue.SimpleQueue[tuple[int, Key, Any]] = queue.SimpleQueue()
        self._listener = self._ports.listener(assignment.pipe, self._mail)
        self._ports.open(assignment.pipe, self._put_message)
        self._arrived: dict[tuple[int, Key], Any] = {}
        self._step = self._aborted = 0
        self._at: Action | None = None
        self._packets_of_action: dict[int, Packet] = {}
        self._lost: WorkerLost | None = None
        self._unreadable: Exception | None = None
        self._forget = on_worker_lost(self._on_worker_lost)
        self._streams = served_streams().attach()
        self._mark: Callable[..., None] | None = device_mark()  # of the stages
        self._thread = threading.Thread(
            target=self._work, name=f"weft-pipeline-{assignment.pipe}", daemon=True
        )
        self._thread.start()

    def _made(self, stage: int, source: Callable[[], nn.Module] | nn.Module) -> nn.Module:
        if isinstance(source, nn.Module):
            return source
        where = f"stage {stage} on worker {self.name!r} could not be made"
        try:
            module: object = source()
        except Exception as error:
            raise PipelineError(
                f"{where}: {type(error).__name__}: {error}", stage=stage, worker=self.name
            ) from error
        if not isinstance(module, nn.Module):
            raise PipelineError(
                f"{where}: its function returned {kind_of(module)}; it returns a module",
                stage=stage,
                worker=self.name,
            )
        return module

    def _make_stage(self, *args: Any) -> StageRun:
        if self.assignment.settings.check_finite:
            return CheckedStage(*args, unit=self.unit, worker=self.name, peer_of=self._peer_of)
        return StageRun(*args)

    def _checkpoints(self, microbatch: int) -> bool:
        rule = self.assignment.settings.checkpoint
        if rule == "except_last":
            return microbatch < self.assignment.table.n_microbatches - 1
        return rule == "always"

    # Other threads

    def put(self, step: int, key: Key, content: Any) -> None:
        """Puts a message into the mailbox; never blocks."""
        self._mail.put((step, key, content))
        self._listener.wake()

    def _put_message(self, peer: Member, message: Any) -> None:
        if peer not in self._peers:
            raise ProtocolError(
                f"it sends values to a pipe of {', '.join(self.assignment.workers)}"
            )
        self.put(_MESSAGE, (), (peer, message))

    def close(self) -> None:
        """Ends the thread; does not wait for it."""
        self._forget()
        self._ports.close(self.assignment.pipe)
        self.put(_END, (), None)

    def _on_worker_lost(self, error: WorkerLost) -> None:
        if error.worker in (*self.assignment.workers, self.assignment.driver):
            self._lost = error
            self.put(0, (), error)

    # The runner's thread

    def _work(self) -> None:
        try:
            self._take_turns()
        finally:
            self._streams.close()

    def _take_turns(self) -> None:
        while True:
            step, key, content = self._mail.get()
            if step == _END:
                self._discard_all()
                self._listener.close()
                return
            if key == START:
                with working_for(content.served):
                    self._run(content)
                del content  # It has a reference of the driver.
                self._listener.rest()
            elif key:
                self._keep(step, key, content)
            elif step == _MESSAGE:
                try:
                    self._read(*content)
                except Exception as error:
                    self._unreadable = error
            elif content is None:  # The end of a step may overtake its start.
                self._aborted = step

    def _discard_all(self) -> None:
        """Releases at their senders the contents of messages that were not read."""
        while not self._mail.empty():
            step, _, content = self._mail.get()
            if step == _MESSAGE:
                self._ports.discard(*content)

    def _read(self, peer: Any, message: Any) -> None:
        """Reads a message of another stage, and keeps it if it is of this step or a later one."""
        head, leaves = self._ports.read(peer, message)
        step, kind, stage, source, microbatch, mask, has_structure = _HEAD.unpack(head)
        structure = None
        if has_structure:
            mask, structure, *leaves = leaves
        self._keep(step, (kind, stage, source, microbatch), Packet(mask, structure, leaves))

    def _keep(self, step: int, key: Key, content: Any) -> None:
        if step >= self._step:
            self._arrived[step, key] = content

    def _take(self, key: Key, limit_s: float = 0.0) -> Any:
        """Returns a message of this step, as soon as it arrives.

        Args:
            key: Which message.
            limit_s: How long to wait, if not for the usual time.

        Raises:
            WorkerLost: A worker of the pipeline was lost.
            PipelineError: The message has not come in time.
        """
        wanted = (self._step, key)
        arrived = self._arrived
        if wanted not in arrived:
            began_s = time.monotonic()
            deadline_s = began_s + (limit_s or self.assignment.settings.limit_s)
            parts = partial(self._awaited_since, key, began_s)
            while wanted not in arrived:
                if self._mail.empty():
                    self._listen(key, deadline_s, parts)
                self._sort(*self._next_mail(key, deadline_s, parts))
            notes = self.notes
            if notes is not None:
                notes.end_wait()
        return arrived.pop(wanted)

    def _next_mail(self, key: Key, deadline_s: float, parts: Waits) -> tuple[int, Key, Any]:
        with contextlib.suppress(queue.Empty):
            return self._mail.get_nowait()
        remaining_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            with waiting(parts):
                return self._mail.get(timeout=min(remaining_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise self._too_late(key) from None

    def _awaited_since(self, key: Key, began_s: float) -> list[Wait]:
        """Returns the message for which ``_take`` waits."""
        _, sender, wanted = self.awaited(key)
        return [Wait("message", "", time.monotonic() - began_s, wanted, (sender,))]

    def _listen(self, key: Key, deadline_s: float, parts: Waits) -> None:
        """Reads the connection to the sender of a message itself, if that is possible."""
        kind, _, source, microbatch = key
        if kind in (FORWARD, BACKWARD):
            self._listener.wait(self._peer_of(source, microbatch), deadline_s, parts)
        else:
            self._listener.rest()

    def _sort(self, step: int, key: Key, content: Any) -> None:
        """Keeps a message, or raises the end of the step."""
        if step == _MESSAGE:
            self._read(*content)
        elif key:
            self._keep(step, key, content)
        elif step == _END:
            self._mail.put((_END, (), None))
            raise Aborted
        elif isinstance(content, WorkerLost):
            raise content
        elif step == self._step:
            raise Aborted

    def _too_late(self, key: Key) -> PipelineError:
        stage, sender, wanted = self.awaited(key)
        return PipelineError(
            f"stage {stage} on worker {self.name!r} waited {self.assignment.settings.limit_s:g} s "
            f"for {wanted} on {sender!r}; that stage takes longer, or waits itself: see "
            "torchweft.rpc.stacks(), or raise timeout",
            stage=stage,
            worker=self.name,
            microbatch=key[3],
        )

    def awaited(self, key: Key) -> tuple[int, str, str]:
        """Returns the stage that waits for a message, its sender, and its description."""
        kind, stage, source, microbatch = key
        if kind == COPIES:
            group = self.assignment.copies.groups[stage]
            stage = next(each.stage for each in group if each.worker == self.assignment.worker)
            source, sender = group[source].stage, self.assignment.workers[group[source].worker]
            wanted = "the gradients of a weight that it shares"
        else:
            wanted = f"{_SHOWN[kind]} of {self.unit} {microbatch}"
            sender = self._peer_of(source, microbatch).name
        return stage, sender, f"{wanted} from stage {source}"

    def _run(self, start: StartCommand) -> None:
        """Runs the row once and completes the future of the step."""
        self._step, self._at = start.step, None
        self._streams.renew()
        if self._mark is not None:
            self._mark()
            self._mark = None
        start.mark(start.inputs, start.targets)
        for old in [each for each in self._arrived if each[0] < start.step]:
            del self._arrived[old]
        try:
            if self._lost is not None:
                raise self._lost
            if self._aborted == start.step:
                raise Aborted
            unreadable, self._unreadable = self._unreadable, None
            if unreadable is not None:
                raise unreadable
            result = self._train(start) if start.is_training else self._infer(start)
        except Aborted:
            self._fail(start, PipelineError("the step was ended by its driver", worker=self.name))
        except WeftError as error:
            self._fail(start, error)
        except Exception as error:
            self._fail(start, self._failure(error))
        else:
            self._streams.publish()
            start.done.set_result(result)

    def _fail(self, start: StartCommand, error: Exception) -> None:
        self._step += 1  # Messages of this step that still come are dropped.
        for stage in self.stages.values():
            stage.reset()
        start.done.set_exception(error)

    def _failure(self, error: Exception) -> Exception:
        at = self._at
        if at is None:
            return error
        taken = ""
        if at.kind is Kind.FORWARD:
            taken = f", given {describe_packets(self._packets_of_action)}"
        failure = PipelineError(
            f"stage {at.stage} on worker {self.name!r} failed in the {_ACTIONS[at.kind]} of "
            f"{self.unit} {at.microbatch}{taken}: {type(error).__name__}: {error}",
            stage=at.stage,
            worker=self.name,
            microbatch=at.microbatch,
        )
        failure.__cause__ = error
        return failure.with_traceback(error.__traceback__)

    def _train(self, start: StartCommand) -> Tensor | None:
        if start.zero_grad is not None:
            self.zero_grad(start.zero_grad)
        earlier = self._set_copies_aside()
        losses: dict[int, Tensor] = {}
        self.peak_held = 0
        notes = self.notes
        if notes is not None:
            notes.begin_step()
        for action in self._row:
            self._at = action
            if action.kind is Kind.FORWARD:
                self._forward(action, start, losses)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                self.stages[action.stage].backward_weight(action.microbatch)
            else:
                self._backward(action)
            if notes is not None:
                notes.end_action()
        self._at = None
        if notes is not None:
            notes.end_step(self._step, self.peak_held)
        for stage in self.stages.values():
            stage.check_weights()
        self._send_copies()
        self._add_copies()
        for weight, gradient in earlier:
            weight.grad = gradient if weight.grad is None else gradient.add_(weight.grad)
        if not losses:
            return None
        return torch.stack([losses[each] for each in sorted(losses)]) / self.assignment.divisor

    def _packets(self, stage: StageRun, microbatch: int, start: StartCommand) -> dict[int, Packet]:
        number = stage.stage
        packets = {
            source: self._take((FORWARD, number, source, microbatch)) for source in stage.sources
        }
        if number in start.inputs:
            packets[BATCH] = Packet(0, None, start.inputs[number][microbatch])
        self._packets_of_action = packets
        return packets

    def _forward(
        self,
        action: Action,
        start: StartCommand,
        losses: dict[int, Tensor],
        weights: Leaves | None = None,
    ) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        packets = self._packets(stage, microbatch, start)
        target = start.targets.get(microbatch)
        outgoing, loss = stage.forward(microbatch, packets, target, weights)
        self.peak_held = max(self.peak_held, sum([each.held for each in self.stages.values()]))
        if loss is not None:
            losses[microbatch] = loss
        for consumer, packet in outgoing.items():
            self._deliver(FORWARD, consumer, action.stage, microbatch, packet)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        gradients = {
            consumer: self._take((BACKWARD, action.stage, consumer, microbatch)).leaves
            for consumer in stage.expects(microbatch)
        }
        run = stage.backward if action.kind is Kind.BACKWARD else stage.backward_input
        for source, found in run(microbatch, gradients).items():
            self._deliver(BACKWARD, source, action.stage, microbatch, Packet(0, None, found))

    def _infer(self, start: StartCommand) -> list[tuple[int, Any]] | None:
        """Runs the forwards of the row; returns the outputs of the last stage by micro-batch."""
        outputs: dict[int, Any] = {}
        for action in self._row:
            if action.kind is not Kind.FORWARD:
                continue
            self._at = action
            stage, microbatch = self.stages[action.stage], action.microbatch
            output, outgoing = stage.infer(self._packets(stage, microbatch, start))
            for consumer, packet in outgoing.items():
                self._deliver(FORWARD, consumer, action.stage, microbatch, packet)
            if not stage.consumers:
                outputs[microbatch] = output
        self._at = None
        return list(outputs.items()) if outputs else None

    def _deliver(self, kind: int, stage: int, source: int, microbatch: int, packet: Packet) -> None:
        """Sends values to the worker of a stage; never waits."""
        self._send(self._peer_of(stage, microbatch), (kind, stage, source, microbatch), packet)

    def _peer_of(self, stage: int, microbatch: int) -> Any:
        """Returns the worker that runs a stage for a micro-batch."""
        return self._peer_by_seat[stage, microbatch]

    def _send(self, peer: Any, key: Key, packet: Packet) -> None:
        if peer.is_self:
            self._keep(self._step, key, packet)
            return
        mask, structure, leaves = packet
        is_plain = structure is None and mask < _MASK_LIMIT
        if not is_plain:
            mask, leaves = 0, (mask, structure, *leaves)
        head = _HEAD.pack(self._step, *key, mask, not is_plain)
        self._ports.post(peer, self.assignment.pipe, head, leaves)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops the gradients that the optimizer steps with."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def _set_copies_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Takes away gradients of earlier steps, of weights that exist more than once.

        All copies have them, so they must not be added over the copies once more.
        """
        earlier = []
        for group in range(len(self.assignment.copies.groups)):
            for weights in self.own_copies(group).values():
                for weight in weights:
                    if weight.grad is not None:
                        earlier.append((weight, weight.grad))
                        weight.grad = None
        return earlier

    def _send_copies(self, microbatch: int = 0) -> None:
        """Sends the gradients of weights that exist more than once to the other copies.

        Args:
            microbatch: Distinguishes several exchanges in one step.
        """
        copies, me = self.assignment.copies, self.assignment.worker
        for number in range(len(copies.groups)):
            others = [worker for worker in copies.workers(number) if worker != me]
            for place, weights in self.own_copies(number).items():
                packet = Packet(0, None, [weight.grad for weight in weights])
                for worker in others:
                    self._send(self._peers[worker], (COPIES, number, place, microbatch), packet)

    def _add_copies(self, microbatch: int = 0) -> None:
        """Waits for the gradients of the other copies; all copies get the sum."""
        for number, members in enumerate(self.assignment.copies.groups):
            mine = self.own_copies(number)
            if not mine:
                continue
            gradients = [
                [weight.grad for weight in mine[place]]
                if place in mine
                else self._take((COPIES, number, place, microbatch)).leaves
                for place in range(len(members))
            ]
            totals = added(gradients)
            for weights in mine.values():
                for weight, total in zip(weights, totals, strict=True):
                    weight.grad = None if total is None else total.clone()

    def own_copies(self, group: int) -> dict[int, list[Tensor]]:
        """Returns the weights of this worker's members of a group, by their place in it."""
        copies = self.assignment.copies
        return {
            place: copies.weights(member, self.stages[member.stage].module)
            for place, member in enumerate(copies.groups[group])
            if member.worker == self.assignment.worker
        }


_ACTIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward to the inputs",
    Kind.BACKWARD_WEIGHT: "backward to the weights",
    Kind.UPDATE: "update",
}
