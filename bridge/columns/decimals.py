"""Decimals as floats. Pure."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

# floats hold integers up to 2**53, and ten to so many, exactly, so that one division rounds once
_EXACT, _EXACT_TENS = 2**53, 22


def decimals_to_floats(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return decimals as the nearest float64; Arrow's own cast is often off by an ulp or two."""
    return pa.chunked_array([_nearest(chunk) for chunk in column.chunks], pa.float64())


def _nearest(chunk: pa.Array) -> pa.Array:
    scale = chunk.type.scale
    words = np.frombuffer(chunk.buffers()[1] or b"", np.int64)[2 * chunk.offset : 2 * (chunk.offset + len(chunk))]
    there = chunk.is_valid().to_numpy(zero_copy_only=False)
    low, high = words[::2], words[1::2]
    is_small = (high == low >> 63) & (np.abs(low) <= _EXACT) | ~there
    if not 0 <= scale <= _EXACT_TENS or len(low) < len(chunk) or not is_small.all():
        return chunk.cast(pa.string()).cast(pa.float64())
    return pa.array(low / 10.0**scale, mask=~there)
