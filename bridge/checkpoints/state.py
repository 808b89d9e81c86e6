"""What a training run is made of, as a state that ranks save together, and back.

Models and optimizers are saved by the names of parameters, in parts where ranks hold parts, so that any number of ranks
loads them. All else with a state is of its rank, and so are the random generators: kept under `rank_<r>`, since equal
names are saved once. What has no state of its own is kept under `values`, as rank 0 has it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from bridge.checkpoints.layout import Index, Leaf
from bridge.checkpoints.random_state import random_state, set_random_state
from bridge.display import format_names
from bridge.distributed import rank, world_size
from bridge.errors import CheckpointError

_STRICT = StateDictOptions(strict=True)
_RANDOM = "random"
_VALUES = "values"


class RunState:
    """The parts of a run by name: models, optimizers, what else has a `state_dict`, and values.

    Raises:
        TypeError: They are no dict.
        ValueError: A part has a name that is kept for ranks, or is the state of a model in place of the model.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        if not isinstance(parts, Mapping):
            raise TypeError(f"the state is a {type(parts).__name__}; give a dict of names and parts.")
        for name in parts:
            if name in (_RANDOM, _VALUES) or name.startswith("rank_"):
                raise ValueError(f"the state has a part named {name!r}, which is kept for the ranks.\n  Rename it.")
        self._models = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        rest = {name: part for name, part in parts.items() if name not in {*self._models, *self._optimizers}}
        self._stateful = {
            name: part
            for name, part in rest.items()
            if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        }
        self.values = {name: part for name, part in rest.items() if name not in self._stateful}
        """The parts that have no state of their own."""
        for name, part in self.values.items():
            if isinstance(part, Mapping) and any(isinstance(value, torch.Tensor) for value in part.values()):
                raise ValueError(
                    f"the part {name!r} is a dict of tensors, which would be restored into a dict and into nothing "
                    "else.\n  Give what it is the state of: the model, not its state_dict()."
                )
        self._begun: list[torch.optim.Optimizer] = []
        self._names: dict[str, list[str]] = {}  # of the parameters of each optimizer, in its order

    def saved(self) -> dict[str, Any]:
        """Return the state that is saved, whose tensors are those in use; the parts are as they were.

        Raises:
            CheckpointError: A part does not give its state.
        """
        state: dict[str, Any] = {}
        for name, model in self._models.items():
            with _blamed(name, "give"):
                state[name] = get_model_state_dict(model, options=_STRICT)
        for name, optimizer in self._optimizers.items():
            with _blamed(name, "give"), _as_it_is(optimizer):
                state[name] = self._state_of(name)
        own: dict[str, Any] = {_RANDOM: Leaf(random_state())}
        for name, part in self._stateful.items():
            with _blamed(name, "give"):
                own[name] = Leaf(part.state_dict())
        state[f"rank_{rank()}"] = own
        if rank() == 0:
            state[_VALUES] = {name: Leaf(part) for name, part in self.values.items()}
        return state

    def wanted(self, index: Index, saved_world_size: int) -> dict[str, Any]:
        """Return what this rank loads of a checkpoint, with the tensors in use to be filled.

        An optimizer that has no state yet gets one; `undo` takes it away.

        Raises:
            CheckpointError: The state does not fit to what was saved.
        """
        paths = {name: tuple(path) for name, path in (index.paths or {}).items()}
        wanted: dict[str, Any] = {}
        problems: list[str] = []
        for name, model in self._models.items():
            with _blamed(name, "give"):
                wanted[name] = get_model_state_dict(model, options=_STRICT)
        for name in self._optimizers:
            with _blamed(name, "give"):
                wanted[name] = self._optimizer_wanted(name, index, paths, problems)
        source = rank() if rank() < saved_world_size else 0
        # on another number of ranks, what is of a rank is that of rank 0: positions are global
        first = source if saved_world_size == world_size() else 0
        wanted[f"rank_{first}"] = {name: Leaf(None) for name in self._stateful}
        wanted.setdefault(f"rank_{source}", {})[_RANDOM] = Leaf(None)
        saved_values = [path[1] for path in paths.values() if path[0] == _VALUES]
        wanted[_VALUES] = {name: Leaf(None) for name in [*saved_values, *self.values]}
        problems += _problems(index, wanted)
        asked, _ = flatten_state_dict(wanted)
        problems += [
            f"{name} is in no part of the state"
            for name, path in paths.items()
            if path[0] in self._models and name not in asked
        ]
        if problems:
            raise CheckpointError(
                f"it does not fit to the state{_here()}: {format_names(problems)}.\n"
                "  Give a state of the same parts, or begin anew in another root; nothing has changed."
            )
        return wanted

    def undo(self) -> None:
        """Take away the state that `wanted` gave to optimizers that had none."""
        for optimizer in self._begun:
            optimizer.state.clear()

    def load(self, loaded: Mapping[str, Any], *, step: int, saved_world_size: int) -> dict[str, Any]:
        """Give all parts and the random generators their states, and return the values.

        Raises:
            CheckpointError: A part does not take its state.
        """
        for name, model in self._models.items():
            with _blamed(name, "take"):
                set_model_state_dict(model, loaded[name], options=_STRICT)
        for name, optimizer in self._optimizers.items():
            with _blamed(name, "take"):
                self._load_optimizer(name, optimizer, loaded[name])
        source = rank() if rank() < saved_world_size else 0
        own = loaded[f"rank_{source if saved_world_size == world_size() else 0}"]
        for name, part in self._stateful.items():
            with _blamed(name, "take"):
                part.load_state_dict(own[name])
        if rank() < saved_world_size:
            with _blamed(_RANDOM, "take"):
                set_random_state(loaded[f"rank_{source}"][_RANDOM])
        else:
            seed = (torch.initial_seed() + step + rank()) % 2**32
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
        return dict(loaded[_VALUES])

    def _state_of(self, name: str) -> dict[str, Any]:
        optimizer = self._optimizers[name]
        state: dict[str, Any] = get_optimizer_state_dict(self._model_of(name, optimizer), optimizer, options=_STRICT)
        return state

    def _load_optimizer(self, name: str, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Give an optimizer its state; parameters that never had a gradient have none, and frozen ones may have one."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        needed = [parameter.requires_grad for parameter in parameters]
        try:
            # torch wants a state for each parameter that requires a gradient, and leaves out that of others
            for parameter, of in zip(parameters, self._names[name], strict=True):
                parameter.requires_grad_(of in state["state"])
            set_optimizer_state_dict(self._model_of(name, optimizer), optimizer, state, options=_STRICT)
        finally:
            for parameter, is_needed in zip(parameters, needed, strict=True):
                parameter.requires_grad_(is_needed)

    def _optimizer_wanted(
        self, name: str, index: Index, paths: Mapping[str, tuple[Any, ...]], problems: list[str]
    ) -> dict[str, Any]:
        """Return a state for what was saved: of parameters that had none then, none is loaded."""
        optimizer = self._optimizers[name]
        if not optimizer.state:
            self._begun.append(optimizer)
        wanted = self._state_of(name)
        there = wanted["state"]
        self._names[name] = [of for group in wanted["param_groups"] for of in group["params"]]
        parameters: dict[str, Any] = get_model_state_dict(self._model_of(name, optimizer), options=_STRICT)
        saved = {full: path[2:] for full, path in paths.items() if path[:2] == (name, "state")}
        wanted["state"] = {of: there[of] for of in {path[0]: None for path in saved.values()} if of in there}
        known, _ = flatten_state_dict({name: wanted})
        for full, path in saved.items():
            if full in known:
                continue
            if path[0] not in parameters:
                problems.append(f"{full} is in no part of the state")
                continue
            stored, like = index.tensors.get(full), parameters[path[0]]
            made: Any = None
            if stored is not None and stored.shape == tuple(like.shape):
                made = torch.zeros_like(like, dtype=stored.dtype)
            elif stored is not None:
                made = torch.zeros(stored.shape, dtype=stored.dtype, device="cpu")
            set_element(wanted["state"], path, made)
        return wanted

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


@contextlib.contextmanager
def _as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from making the state of an optimizer that has none, which it does with a step that counts.

    It takes no step where there is a gradient: torch/distributed/checkpoint/state_dict.py, _init_optim_state.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        yield
        return
    parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        parameters[0].grad = None


def _problems(index: Index, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was not saved, or not so."""
    asked, _ = flatten_state_dict(dict(wanted))
    for name, value in asked.items():
        stored = index.tensors.get(name)
        is_there = stored is not None or name in index.values or name in index.pickles
        if not is_there:
            yield f"{name} was not saved"
        elif isinstance(value, torch.Tensor) != (stored is not None):
            yield f"{name} was saved as {'no ' * (stored is None)}tensor"
        elif stored is not None and (stored.shape != tuple(value.shape) or stored.dtype != value.dtype):
            told = f"{list(stored.shape)} of {stored.dtype}, not {list(value.shape)} of {value.dtype}"
            yield f"{name} was saved as {told}"


@contextlib.contextmanager
def _blamed(name: str, does: Literal["give", "take"]) -> Iterator[None]:
    """Say of an error of which part it is."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as exc:  # of anybody's class
        advice = {
            "give": "See its state_dict.",
            "take": "Parts of the state may have changed: go on in a new process.",
        }
        raise CheckpointError(
            f"{name!r} does not {does} its state{_here()}: {type(exc).__name__}: {exc}.\n  {advice[does]}"
        ) from exc


def _here() -> str:
    return f" on rank {rank()}" if world_size() > 1 else ""
