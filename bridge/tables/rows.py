"""The rows that rank 0 has read, sent to all ranks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa

from bridge.distributed import SEE_LOGS, broadcast_block, from_rank_0, on_every_rank, rank
from bridge.errors import RankError

_CHUNK_BYTES = 32 << 20


def broadcast_rows(rows: pa.Table | None, *, what: str) -> pa.Table:
    """Return the rows that rank 0 gives on every rank, in the same record batches.

    No rank holds them twice. They are received into one buffer, which is Arrow's own since one of Arrow's threads may
    let go of it last: Python's would need the interpreter for that, and one that ends just then aborts.

    Raises:
        RankError: As in `from_rank_0`; or a rank was lost while rows were sent.
        MemoryError: A rank lacks the memory for them; on every rank.
    """
    num_bytes = from_rank_0(lambda: _stream(rows, pa.MockOutputStream()), what=f"{what}: bytes")
    pool = pa.system_memory_pool()
    memory: Any = on_every_rank(
        lambda: pa.allocate_buffer(num_bytes, memory_pool=pool) if rank() else None, what=f"{what}: memory"
    )
    try:
        if rank() == 0:
            _stream(rows, pa.PythonFile(_Chunks(num_bytes), mode="w"))
            return rows
        received = np.frombuffer(memory, np.uint8)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            broadcast_block(received[start : start + _CHUNK_BYTES])
    except RuntimeError as exc:
        raise RankError(f"a rank was lost during {what}, while rows were sent: {exc}.{SEE_LOGS}") from exc
    return pa.ipc.open_stream(memory).read_all()


def _stream(rows: pa.Table, sink: pa.NativeFile) -> int:
    """Write rows as an Arrow IPC stream; return its bytes."""
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return int(sink.tell())


class _Chunks(io.RawIOBase):
    """A file of `num_bytes` that is sent while it is written, through one block of memory."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._block = np.empty(min(_CHUNK_BYTES, num_bytes), np.uint8)
        self._filled = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Send whole chunks, and the last."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            size = min(len(self._block) - self._filled, view.nbytes - done)
            self._block[self._filled : self._filled + size] = view[done : done + size]
            done += size
            self._filled += size
            if self._filled in (len(self._block), self._left):
                broadcast_block(self._block[: self._filled])
                self._left -= self._filled
                self._filled = 0
        return done
