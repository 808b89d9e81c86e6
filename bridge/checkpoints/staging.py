"""Copies of a state in memory that is used again, so that training goes on while they are written."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed.tensor

_ALIGNMENT = 64


class Staging:
    """Copies the tensors of a state into one block of memory, which it keeps for the next.

    The block is pinned where CUDA is. A second state that comes while the first is in use gets memory of its own.
    """

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        # alive as long as any tensor that was staged in the block
        self._user: weakref.ref[Any] | None = None

    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a nested state whose tensors are in the block; other values are copied too."""
        tensors: dict[int, torch.Tensor] = {}
        _collect(state, tensors)
        num_bytes = sum(_padded(tensor.nbytes) for tensor in tensors.values())
        block = self._take(num_bytes)
        copies: dict[int, torch.Tensor] = {}
        start = 0
        devices = set()
        for key, tensor in tensors.items():
            copy = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            copies[key] = copy
            start += _padded(tensor.nbytes)
        for device in devices:
            torch.cuda.synchronize(device)
        made: dict[str, Any] = _rebuilt(state, copies)
        return made

    def _take(self, num_bytes: int) -> torch.Tensor:
        if self._user is not None and self._user() is not None:
            return _memory(num_bytes)
        if self._block is None or self._block.nbytes < num_bytes:
            self._block = None
            self._block = _memory(num_bytes)
        array = self._block.numpy()
        self._user = weakref.ref(array)
        return torch.from_numpy(array)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the block."""
        block = self._block
        return block is not None and block.data_ptr() <= tensor.data_ptr() < block.data_ptr() + block.nbytes

    def give_back(self) -> None:
        """Let the block be used again although what was staged in it may be referenced yet: it is written."""
        self._user = None

    def close(self) -> None:
        """Let go of the memory."""
        self._block = self._user = None


def _memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _local(value: Any) -> torch.Tensor | None:
    """Return the memory of this rank's part of a tensor; None for what is no tensor."""
    if isinstance(value, torch.distributed.tensor.DTensor):
        return value.to_local().detach()
    return value.detach() if isinstance(value, torch.Tensor) else None


def _collect(value: Any, found: dict[int, torch.Tensor]) -> None:
    if (tensor := _local(value)) is not None:
        found[id(value)] = tensor
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, found)


def _rebuilt(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    if (copy := copies.get(id(value))) is not None and isinstance(value, torch.Tensor):
        if isinstance(value, torch.distributed.tensor.DTensor):
            return type(value).from_local(
                copy, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        return copy
    if isinstance(value, Mapping):
        return {key: _rebuilt(part, copies) for key, part in value.items()}
    if isinstance(value, list):
        return [_rebuilt(part, copies) for part in value]
    if isinstance(value, tuple):
        return tuple(_rebuilt(part, copies) for part in value)
    return deepcopy(value)
