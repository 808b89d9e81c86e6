"""Batches of Hugging Face datasets."""

from __future__ import annotations

from typing import Any

from bridge.loading.dataset import OrderedDataset


def is_huggingface(dataset: Any) -> bool:
    """Return whether it is a dataset of Hugging Face's."""
    return False


def open_huggingface(dataset: Any, **options: Any) -> OrderedDataset:
    """Return batches of a dataset of Hugging Face's."""
    raise NotImplementedError
