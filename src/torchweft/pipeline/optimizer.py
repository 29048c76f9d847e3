"""The optimizer of a pipeline, as its driver sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer

from torchweft.errors import ConfigurationError, SerializationError
from torchweft.optim.groups import Options, changed_options, copied_options
from torchweft.pipeline import host, weights
from torchweft.pipeline.deployment import Deployment


class PipeOptimizer(Optimizer):
    """The optimizers of a pipeline's workers, one for the weights of each; ``Pipe.optimizer``.

    ``param_groups`` has one group, with the hyper-parameters of all weights. It may be changed at
    any time, also by the schedulers of ``torch.optim.lr_scheduler``: the next step tells the
    workers. Not thread-safe.

    Args:
        deployment: Returns the stages as they are placed now.
        drop_gradients: Has the pipeline's next step drop all gradients first.
        optimizer_class: Called on each worker with its weights and ``options``.
        options: Keyword arguments of the optimizer.
    """

    def __init__(
        self,
        deployment: Callable[[], Deployment],
        drop_gradients: Callable[[], None],
        optimizer_class: Callable[..., Optimizer],
        options: Options,
    ) -> None:
        self._deployment = deployment
        self._drop_gradients = drop_gradients
        self._recipe = (optimizer_class, options)
        self._is_base_ready = False
        super().__init__([{"params": []}], {})
        self._is_base_ready = True
        self.defaults.update(self._make(deployment()))
        self.param_groups.append({"params": [], **copied_options(self.defaults)})
        self._told = self.options()

    def _make(self, deployment: Deployment) -> Options:
        """Makes the optimizers of all workers; returns their hyper-parameters."""
        found = deployment.call_all(host.make_optimizer, *self._recipe)
        return next((options for options in found if options), {})

    def options(self) -> Options:
        """Returns a copy of the hyper-parameters."""
        (group,) = self.param_groups
        return copied_options({key: value for key, value in group.items() if key != "params"})

    def move(self, deployment: Deployment) -> None:
        """Makes the optimizers of other workers, with the present hyper-parameters."""
        self._make(deployment)
        deployment.call_all(host.set_options, self.options())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses further weights: the optimizer has all that the stages train.

        Raises:
            ConfigurationError: Always.
        """
        if self._is_base_ready:  # The base class requires an empty group.
            raise ConfigurationError(
                "a PipeOptimizer has all weights of the stages; set requires_grad of those that "
                "are not to be trained"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients when the next step of the pipeline begins.

        Args:
            set_to_none: Makes no difference.
        """
        self._drop_gradients()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps the optimizer of each worker; blocks until all are done.

        Args:
            closure: Not supported.

        Raises:
            ConfigurationError: There is a closure.
            WorkerLost: A worker was lost; some of the others have made the step.
        """
        if closure is not None:
            raise ConfigurationError("a PipeOptimizer takes no closure; call pipe.step before it")
        changes = changed_options(self.param_groups[0], self._told)
        self._deployment().call_all(host.step_optimizer, changes)
        self._told.update(changes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each weight by its name, copied to the driver, and the options.

        The names are those of ``Pipe.state_dict``. Of copies of a weight it returns one's state.
        """
        state: dict[str, Any] = {}
        for each in self._deployment().call_named(weights.optimizer_state):
            state |= each | state  # Of replicas, the first.
        return {"state": state, "param_groups": [{**self.options(), "params": list(state)}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of this class; the stages may be cut in another way.

        Raises:
            ConfigurationError: It is no state of such an optimizer.
        """
        try:
            (group,), state = state_dict["param_groups"], dict(state_dict["state"])
            if any(not isinstance(name, str) for name in state):
                raise ValueError("its weights have no names")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"this is no state_dict of a PipeOptimizer ({error}); load what its state_dict() "
                "returned"
            ) from error
        self.adopt(group, self._deployment())
        self._deployment().call_named(weights.set_optimizer_state, state)

    def adopt(self, options: Options, deployment: Deployment) -> None:
        """Sets the hyper-parameters, here and on the workers."""
        changes = {key: value for key, value in options.items() if key != "params"}
        self.param_groups[0].update(copied_options(changes))
        self._told = self.options()
        deployment.call_all(host.set_options, self._told)

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a PipeOptimizer cannot be copied or sent; keep its state_dict(), or Pipe.save"
        )

    def __repr__(self) -> str:
        kind = getattr(self._recipe[0], "__name__", repr(self._recipe[0]))
        return f"PipeOptimizer of {kind} on {', '.join(map(repr, self._deployment().workers))}"
