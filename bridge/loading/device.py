"""Batches on their way to a GPU: from pinned memory, beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        return (_moved(marked, device) for marked in batches)
    return _copied_ahead(batches, device)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)

    def start(marked: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return _moved(marked, device), stream.record_event()

    def wait(marked: Any, copied: torch.cuda.Event) -> Any:
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)

        def record(values: torch.Tensor) -> torch.Tensor:
            values.record_stream(computing)  # its memory is kept until what is computed with it is done
            return values

        return marked._replace(batch=_each(record, marked.batch))

    ahead = None
    for marked in batches:
        begun = start(marked)
        if ahead is not None:
            yield wait(*ahead)
        ahead = begun
    if ahead is not None:
        yield wait(*ahead)


def _moved(marked: Any, device: torch.device) -> Any:
    return marked._replace(batch=_each(lambda values: values.to(device, non_blocking=True), marked.batch))


def _each(call: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Return a batch with what `call` makes of its tensors; what is no tensor stays."""
    if isinstance(batch, torch.Tensor):
        return call(batch)
    if isinstance(batch, dict):
        return {name: _each(call, part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each(call, part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_each(call, part) for part in batch)
    return batch
