"""Batches on their way to a GPU: from pinned memory, beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data._utils.pin_memory import pin_memory

Marked = TypeVar("Marked", bound=NamedTuple)  # whose last field is a batch


def pinned(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches in memory from which a GPU copies without waiting; as they are where CUDA is not."""
    if not torch.cuda.is_available():
        return batches
    return (marked._replace(batch=pin_memory(marked.batch)) for marked in batches)


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on a device; on a GPU, each is copied while the one before is computed with."""
    if device.type != "cuda":
        return (marked._replace(batch=_moved(marked.batch, device)) for marked in batches)
    return _copied_ahead(batches, device)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)

    def start(marked: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return marked._replace(batch=_moved(marked.batch, device)), stream.record_event()

    def wait(marked: Any, copied: torch.cuda.Event) -> Any:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        _record(marked.batch, computing)
        return marked

    ahead = None
    for marked in batches:
        begun = start(marked)
        if ahead is not None:
            yield wait(*ahead)
        ahead = begun
    if ahead is not None:
        yield wait(*ahead)


def _moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; what is no tensor stays."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(part, device) for part in batch)
    return batch


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a batch until what `stream` computes with it is done."""
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, dict):
        for part in batch.values():
            _record(part, stream)
    elif isinstance(batch, list | tuple):
        for part in batch:
            _record(part, stream)
