"""What a training run is made of, as a state that ranks save together, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from bridge.checkpoints.random_state import random_state, set_random_state
from bridge.errors import CheckpointError

_STRICT = StateDictOptions(strict=True)
_RANDOM = "random"


class RunState:
    """The parts of a run by name: models, optimizers, what else has a `state_dict`, and values.

    Models and optimizers are saved by the names of parameters, in parts where ranks hold parts, so that any number of
    ranks loads them. All else with a state is of its rank, and so are the random generators: kept under `rank_<r>/`,
    since equal names are saved once. Values are those of rank 0.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for name in parts:
            if name == _RANDOM or name.startswith("rank_"):
                raise ValueError(f"the state has a part named {name!r}, which is kept for the ranks.\n  Rename it.")
        self.parts = dict(parts)
        self._models = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._stateful = {
            name: part
            for name, part in parts.items()
            if name not in self._models and name not in self._optimizers
            and hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        }  # fmt: skip

    def shared(self) -> dict[str, Any]:
        """Return the states of models and optimizers, whose tensors are those in use."""
        models = {name: get_model_state_dict(model, options=_STRICT) for name, model in self._models.items()}
        return models | {
            name: get_optimizer_state_dict(self._model_of(name, optimizer), optimizer, options=_STRICT)
            for name, optimizer in self._optimizers.items()
        }

    def values(self) -> dict[str, Any]:
        """Return the parts that have no state of their own."""
        known = {*self._models, *self._optimizers, *self._stateful}
        return {name: part for name, part in self.parts.items() if name not in known}

    def of_rank(self) -> dict[str, Any]:
        """Return the states that are this rank's own."""
        return {**{name: part.state_dict() for name, part in self._stateful.items()}, _RANDOM: random_state()}

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Give models and optimizers their states."""
        for name, model in self._models.items():
            set_model_state_dict(model, state[name], options=_STRICT)
        for name, optimizer in self._optimizers.items():
            set_optimizer_state_dict(self._model_of(name, optimizer), optimizer, state[name], options=_STRICT)

    def load_of_rank(self, state: Mapping[str, Any], *, with_random: bool) -> None:
        """Give all else that has a state its own, and the random generators theirs if asked."""
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])
        if with_random:
            set_random_state(state[_RANDOM])

    def _model_of(self, name: str, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """Return the model whose parameters an optimizer changes.

        Raises:
            CheckpointError: No model of the state has them.
        """
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models.values():
            if wanted <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise CheckpointError(
            f"the optimizer {name!r} changes parameters of no model in the state.\n  Put its model into the state too."
        )
