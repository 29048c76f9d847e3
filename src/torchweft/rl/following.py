"""Copies of a policy beside the observers, which take over the weights that a learner publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.errors import ConfigurationError
from torchweft.rl.policies import Decision, LocalPolicy
from torchweft.rpc import RRef
from torchweft.weights import Publisher, Subscriber


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
