"""Switches the spans of one worker on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchweft.engine.worker.agent import Slot
from torchweft.errors import ConfigurationError, ObserveError
from torchweft.rpc.node import Node, current_node

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class Spans:
    """Makes spans of OpenTelemetry of what this worker does, in a block or until ``stop``.

    Each call makes a span at its caller and one at its callee, where spans are on there too. It
    carries the caller's context, so the spans of a step are one trace over all workers, and spans
    that the program itself makes in served functions are in it. A context that calls carry goes on
    through workers whose spans are on. Parts of backward passes and steps of optimizers are spans
    as well. Needs the extra ``otel``, and an SDK that the program sets up, on each worker.

    Args:
        tracer_provider: Makes the spans; None for the provider of the process.

    Raises:
        ConfigurationError: The extra is missing.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from torchweft.observe.telemetry import tracer
        except ImportError as error:
            raise ConfigurationError(
                f"there are no spans without the package {error.name!r}: "
                "pip install 'torchweft[otel]', and an SDK with an exporter"
            ) from error
        self._tracer = tracer.Tracer(tracer_provider)
        self._node: Node | None = None
        self._hooks: list[Any] = []

    def start(self) -> Spans:
        """Makes spans from now on, until ``stop`` or until the worker leaves its group.

        Returns:
            This object.

        Raises:
            ObserveError: Spans are on already in this worker.
            NotInitialized: This process is no worker.
        """
        node = current_node()
        others: object = node.agent.slots.setdefault(_SPANS, self)
        if self._node is not None or others is not self:
            raise ObserveError(
                f"spans are on already in worker {node.agent.info.name!r}: stop those first"
            )
        self._node = node
        self._hooks = [
            register_optimizer_step_pre_hook(self._tracer.step_begins),
            register_optimizer_step_post_hook(self._tracer.step_ends),
        ]
        node.on_end[self] = self.stop
        self._tracer.begin(node.agent.me.id)
        node.worker.watch(self._tracer)
        return self

    def stop(self) -> None:
        """Makes no further spans; nothing if none are made. Thread-safe."""
        node, self._node = self._node, None
        if node is None:
            return
        node.on_end.pop(self, None)
        node.worker.unwatch(self._tracer)
        for hook in self._hooks:
            hook.remove()
        node.agent.slots.pop(_SPANS, None)

    def __enter__(self) -> Spans:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()


_SPANS: Slot[Spans] = Slot()
"""The spans of a worker, while they are on."""
