"""What observers ask: an agent that decides for all of them, or a copy of a policy beside each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchweft.arguments import wrong_type
from torchweft.errors import ConfigurationError
from torchweft.extending import rebuilds_plain
from torchweft.rl.errors import WrongActions
from torchweft.rl.policies import NUMBER, Decision, LocalPolicy
from torchweft.rpc import Future, RRef, expose, functions
from torchweft.weights import Publisher, Subscriber

LONGEST_WAIT_S = 0.1
"""How long a batch waits at most for an observer that is slower than the others."""


class Agent:
    """Serves a policy; its calls are batched: see ``torchweft.rpc.functions.batched``.

    A batch waits for all observers that take part, see ``expect``. One that keeps a batch waiting
    for the longest wait is not waited for again until it has asked. So a forward pass is for all
    observers that keep up, and an observer that hangs delays the others once.

    Observers that ask together must have equally many environments; a call of another shape fails
    with ``BatchError``, which names the worker and the shapes. Subclasses may override ``act`` with
    other options of ``batched``; on a strict worker, with ``rpc.expose`` above it.

    Args:
        policy: The policy. It is not copied, so a learner may update it where it is.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        if not callable(getattr(policy, "act", None)):
            raise wrong_type("policy", policy, "pass a LocalPolicy, whose decide runs the network")
        self.policy = policy
        self._lock = threading.Lock()
        self._observers = self._awaited = 1
        self._punctual: frozenset[int] = frozenset()
        """While fewer are awaited than take part: the first environments of those that came."""

    @expose
    @functions.batched(largest=256, longest_wait=LONGEST_WAIT_S)
    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        """Chooses actions for the environments of one call; see ``Policy``.

        Raises:
            WrongActions: The policy did not return a row for each environment.
        """
        calls = environments.shape[:2]  # calls, environments of each
        self._adapt(environments)
        made = self.policy.act(observations.flatten(0, 1), environments.flatten(0, 1))
        for name, rows in {"actions": made.actions, **made.outputs}.items():
            _check_rows(name, rows, calls)
        outputs = {name: _by_call(each, calls) for name, each in made.outputs.items()}
        return Decision(_by_call(made.actions, calls), made.version, outputs)

    @property
    def version(self) -> int:
        """Version of the policy."""
        return self.policy.version

    @expose
    def get_version(self) -> int:
        """Returns the version of the policy; for other workers."""
        return self.version

    @expose
    def expect(self, observers: int) -> None:
        """Has batches wait for the calls of so many observers, for at most the longest wait."""
        with self._lock:
            self._observers = self._awaited = max(observers, 1)
            functions.expect_calls(self.act, self._awaited)

    def _adapt(self, environments: Tensor) -> None:
        """After a batch that lacked calls awaits only its own; and all again, once another comes.

        Args:
            environments: Those of a batch, int64 ``(calls, n, 3)``.
        """
        if len(environments) >= self._awaited == self._observers:
            return
        came = frozenset(environments[:, 0, NUMBER].tolist())
        with self._lock:
            if len(environments) < self._awaited:
                self._awaited, self._punctual = len(environments), came
            elif came <= self._punctual:
                return
            else:
                self._awaited = self._observers
            functions.expect_calls(self.act, self._awaited)

    @expose
    def forget(self, environments: Tensor) -> None:
        """Drops the recurrent states of environments that are gone, by number, int64 ``(n,)``."""
        self.policy.forget(environments)

    @expose
    def statistics(self) -> functions.BatchStatistics:
        """Returns what the batches have been so far."""
        return functions.batch_statistics(self.act)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the policy, for a snapshot."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a snapshot."""
        self.policy.load_state_dict(state)


def _check_rows(name: str, rows: Tensor, calls: torch.Size) -> None:
    if not rows.ndim or len(rows) != calls.numel():
        raise WrongActions(
            f"the policy was asked by {calls[0]} observers with {calls[1]} environments each, and "
            f"returned {name} of shape {list(rows.shape)}; the first dimension must be "
            f"{calls.numel()}",
            expected=(calls.numel(), *rows.shape[1:]),
            found=tuple(rows.shape),
        )


def _by_call(rows: Tensor, calls: torch.Size) -> Tensor:
    return rows.reshape(*calls, *rows.shape[1:])


@rebuilds_plain
class RemotePolicy:
    """A policy that is an agent on another worker.

    Args:
        agent: The agent.
        timeout_s: Limit of each call, in seconds.
    """

    __match_args__ = ("agent", "timeout_s")

    def __init__(self, agent: RRef[Agent], timeout_s: float) -> None:
        self.agent = agent
        self.timeout_s = timeout_s

    def begin(self, observations: Tensor, environments: Tensor) -> Future[Decision]:
        """Asks for actions without waiting for them."""
        future: Future[Decision] = self.agent.rpc_async(self.timeout_s).act(
            observations, environments
        )
        return future

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        """Asks for actions, and waits for them."""
        return self.begin(observations, environments).wait()


@rebuilds_plain
class FollowingPolicy:
    """Decides beside the observer, with the newest weights that have arrived there.

    For policies whose calls would cost more than their forward passes. Give it to ``Observers`` in
    place of an agent. Each process makes a copy of the policy when an observer first asks it, and
    follows the publisher; before each decision the copy takes over the newest version, see
    ``torchweft.weights.Subscriber``. The version of a decision is the number of that version.
    Thread-safe.

    Args:
        make: Makes the policy; a function of a module, or any other that can be pickled.
        publisher: What publishes the weights of the learner's network, under the names of
            ``LocalPolicy.network``. It must have published a version before observers begin.
        timeout_s: How long an observer waits for its first version, in seconds.
        awaits_newest: Whether an observer begins a trajectory only with the newest version that is
            published by then; it waits for it, for at most ``timeout_s``. Then all actions of a
            round are by one version, the learner's, as with an agent. It costs a call.

    Raises:
        NotInitialized: This process is not a worker.
        ConfigurationError: The time limit is not positive.

    Example::

        policy = make_policy()
        publisher = weights.Publisher(policy.network)
        publisher.publish()
        following = rl.FollowingPolicy(make_policy, publisher)
        with rl.Observers(workers, environments, following, most_stale=2) as observers:
            for trajectory in observers.stream():
                learn(policy.network, trajectory)
                publisher.publish()
    """

    __match_args__ = ("make", "publisher", "timeout_s", "awaits_newest")

    def __init__(
        self,
        make: Callable[[], LocalPolicy],
        publisher: Publisher | RRef[Publisher],
        timeout_s: float = 30.0,
        awaits_newest: bool = False,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s={timeout_s!r}: pass a positive time, in seconds")
        self.make = make
        self.publisher = RRef(publisher) if isinstance(publisher, Publisher) else publisher
        self.timeout_s = timeout_s
        self.awaits_newest = awaits_newest
        self._prepare()

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._policy: LocalPolicy | None = None
        self._subscriber: Subscriber | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__match_args__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    @property
    def version(self) -> int:
        """Number of the newest version that was published; asks the publisher, elsewhere."""
        return self.publisher.rpc_sync(self.timeout_s).get_version()

    def begin_trajectory(self) -> None:
        """With ``awaits_newest``, waits for the newest version, and takes it over.

        Raises:
            CallTimeout: It has not arrived in time.
            WeightsMismatch: As ``act``.
            WorkerLost: The publisher was lost.
        """
        if not self.awaits_newest:
            return
        newest = self.version
        deadline_s = time.monotonic() + self.timeout_s
        with self._lock:
            policy, subscriber = self._followed()
            while policy.version < newest:
                left_s = max(deadline_s - time.monotonic(), 0.001)
                policy.version = subscriber.update(timeout=left_s)

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        """Chooses actions; see ``Policy``.

        Raises:
            CallTimeout: No version has arrived in time, as none was published.
            WeightsMismatch: The copy has other weights than those that are published.
            WorkerLost: The publisher was lost before the first version had arrived.
        """
        with self._lock:
            # Under the lock: a version is put in while no other observer decides.
            policy, subscriber = self._followed()
            policy.version = subscriber.update()
            return policy.act(observations, environments)

    def _followed(self) -> tuple[LocalPolicy, Subscriber]:
        if self._policy is None:
            self._policy = self.make()
        if self._subscriber is None:
            self._subscriber = self._subscribe(self._policy)
            self._policy.version = self._subscriber.version
        return self._policy, self._subscriber

    def forget(self, environments: Tensor) -> None:
        """Drops the recurrent states of environments that are gone, by number, int64 ``(n,)``."""
        with self._lock:
            if self._policy is not None:
                self._policy.forget(environments)

    def close(self) -> None:
        """Stops following in this process; the next ``act`` follows again."""
        with self._lock:
            subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _subscribe(self, policy: LocalPolicy) -> Subscriber:
        subscriber = Subscriber(self.publisher, policy.network, timeout=self.timeout_s)
        try:
            subscriber.update(timeout=self.timeout_s)
        except BaseException:
            subscriber.close()
            raise
        return subscriber
