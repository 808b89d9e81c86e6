"""64 bits of each row of a batch, equal only for equal rows as far as 64 bits go. Pure.

Each value's raw bits are mixed with what its place in the row is: the name and dtype of its column, and its number in
an array. A row's hash is the sum of them, mixed once more. So NaNs of other bits differ, as 0.0 and -0.0 do, and two
values that change places. The same in every process.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pandas.util import hash_array

Hashes = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK_VALUES = 1 << 18  # what fits in the cache of a core
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_KINDS = {str: 1, bytes: 2, type(None): 3}


def hash_rows(*batches: Any, leave_out: Collection[str] = ()) -> Hashes:
    """Return a hash of each row of some batches, in order; that of many small ones costs less at once.

    Args:
        batches: Each a tensor, (X, y), or a dict of what `Table.to_torch` makes of columns; on any device.
        leave_out: Columns of a dict, of strings, whose values do not count.

    Raises:
        TypeError: There is something else in one.
    """
    named = list(map(_named, batches))
    if any(one.keys() != named[0].keys() for one in named):
        return np.concatenate([hash_rows(batch, leave_out=leave_out) for batch in batches])
    return mix(_sum(_column([one[name] for one in named], name, leave_out) for name in named[0]))


def _named(batch: Any) -> dict[Any, Any]:
    if isinstance(batch, dict):
        named = batch
    else:
        # older versions of torch make a list of a tuple that they pin
        named = {str(index): part for index, part in enumerate(batch if isinstance(batch, tuple | list) else [batch])}
    if not named:
        raise TypeError("a batch has no columns, and with them no rows to compare.")
    return named


def mix(values: Hashes) -> Hashes:
    """Return each number with its bits mixed, one to one: the finaliser of SplitMix64."""
    made = values ^ (values >> np.uint64(30))
    made *= np.uint64(0xBF58476D1CE4E5B9)
    made ^= made >> np.uint64(27)
    made *= np.uint64(0x94D049BB133111EB)
    made ^= made >> np.uint64(31)
    return made


def _column(parts: list[Any], name: str, leave_out: Collection[str]) -> Hashes:
    if name in leave_out:
        return np.zeros(sum(map(len, parts)), np.uint64)
    first = parts[0]
    if len(parts) > 1 and all(_is_plain(part) and part.dtype == first.dtype for part in parts):
        bits = torch.cat([part.detach().cpu().view(_INTEGERS[part.element_size()]) for part in parts])
        return _dense(bits, _salt(name, f"{first.dtype} []"))
    return np.concatenate([_hashed(part, name) for part in parts])


def _is_plain(values: Any) -> bool:
    """Return whether it is a tensor of one number for each row."""
    return isinstance(values, torch.Tensor) and values.layout is torch.strided and values.dim() == 1


def _hashed(values: Any, path: str) -> Hashes:
    """Return a hash of each row's value in a column."""
    if isinstance(values, dict):
        return mix(_sum(_hashed(part, f"{path}\0{name}") for name, part in values.items()) ^ _salt(path, "dict"))
    if isinstance(values, tuple | list) and len(values) == 2 and isinstance(values[0], torch.Tensor):
        elements, offsets = values
        return _jagged(elements, offsets, _salt(path, f"offsets {elements.dtype}"))
    if isinstance(values, list):
        return mix(_objects(values, path) ^ _salt(path, "list"))
    if not isinstance(values, torch.Tensor):
        raise TypeError(
            f"{path!r} of a batch is {type(values).__name__}, which has no rows to compare.\n"
            "  Give the batches as the dataset made them."
        )
    values = values.detach().cpu()
    if values.is_nested:
        return _jagged(values.values(), values.offsets(), _salt(path, f"nested {values.dtype}"))
    if values.is_sparse:
        return _sparse(values.coalesce(), _salt(path, f"sparse {values.dtype}"))
    return _dense(values, _salt(path, f"{values.dtype} {list(values.shape[1:])}"))


def _dense(values: torch.Tensor, salt: np.uint64 = np.uint64(0)) -> Hashes:  # noqa: B008 - a number
    """Return a hash of each row of a tensor."""
    size = values.element_size()
    bits = values.contiguous().view(_INTEGERS[size]).numpy().view(_UNSIGNED[size])
    if bits.ndim == 1:
        return mix(bits ^ salt)
    bits = bits.reshape(len(bits), math.prod(bits.shape[1:]))
    salts = mix(np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    made = np.empty(len(bits), np.uint64)
    step = max(1, _BLOCK_VALUES // max(1, bits.shape[1]))
    for start in range(0, len(bits), step):
        block = bits[start : start + step] ^ salts
        made[start : start + step] = mix(block).sum(axis=1, dtype=np.uint64)
    return mix(made ^ salt)


def _jagged(elements: torch.Tensor, offsets: torch.Tensor, salt: np.uint64) -> Hashes:
    """Return a hash of each row where row i has the elements [offsets[i], offsets[i + 1])."""
    bounds = offsets.cpu().numpy()
    lengths = np.diff(bounds)
    hashes = _dense(elements.detach().cpu())[bounds[0] : bounds[-1]]
    places = np.arange(len(hashes)) - np.repeat(bounds[:-1] - bounds[0], lengths)
    return mix(_summed(hashes, places, bounds - bounds[0]) ^ salt)


def _sparse(values: torch.Tensor, salt: np.uint64) -> Hashes:
    """Return a hash of each row of a coalesced tensor [rows, size], of what is stored."""
    rows, places = values.indices().numpy()
    bounds = np.searchsorted(rows, np.arange(values.shape[0] + 1))
    return mix(_summed(_dense(values.values()), places, bounds) ^ salt)


def _summed(hashes: Hashes, places: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64]) -> Hashes:
    """Return the sum of the hashes of each row's elements, mixed with their places in the row."""
    placed = mix(hashes ^ mix((places + 1).astype(np.uint64) * np.uint64(_GOLDEN)))
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(placed, dtype=np.uint64)])
    made: Hashes = totals[bounds[1:]] - totals[bounds[:-1]]
    return made


def _objects(values: list[Any], path: str) -> Hashes:
    """Return a hash of each string, bytes or None."""
    kinds = np.fromiter((_KINDS.get(type(value), 0) for value in values), np.uint64, len(values))
    if not kinds.all():
        other = type(values[int(np.argmin(kinds))]).__name__
        raise TypeError(
            f"{path!r} of a batch is a list of {other}; only strings, bytes and None are compared.\n"
            "  Give the batches as the dataset made them."
        )
    # pandas hashes None as the text "None", and b"a" as "a"; categorize would cut texts at "\0"
    hashes: Hashes = hash_array(np.array(values, dtype=object), categorize=False)
    return hashes ^ mix(kinds)


@functools.lru_cache(4096)
def _salt(path: str, kind: str) -> np.uint64:
    digest = hashlib.blake2b(f"{kind}\0{path}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _sum(parts: Iterable[Hashes]) -> Hashes:
    return functools.reduce(np.add, parts)
