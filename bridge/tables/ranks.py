"""One load for all ranks: rank 0 talks to Spark, the others receive its rows or open its export."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from bridge.columns.policies import Policy
from bridge.distributed import from_rank_0, on_every_rank, rank, world_size
from bridge.errors import VolumeError
from bridge.loading.row_groups import CollectedRowGroups
from bridge.manifest import Manifest
from bridge.tables.rows import broadcast_rows
from bridge.tables.table import Table
from bridge.volumes.commit import read_marker
from bridge.volumes.storage import wait_for_files
from bridge.volumes.stores import LocalStorage

# how long what rank 0 exported may stay unseen by others
SEEN_S = 30.0


def shared(load: Callable[[], Table], name: str, arguments: Mapping[str, Any]) -> Table:
    """Return the table of `load` on every rank; where there are several, rank 0 alone calls it.

    After a collect every rank holds the rows, after an export all read the same shards.

    Args:
        name: The function that was called.
        arguments: What it was called with, `source` among it; equal on all ranks. What has no text of its own, such as
            a DataFrame, is compared by its class.

    Raises:
        RankError: A rank did not make this call, made another one, or was lost.
        VolumeError: A rank does not see the export that rank 0 made; on every rank.
        Exception: What `load` raised on rank 0; on every rank.
    """
    if world_size() == 1:
        return load()
    what = f"{name}({_text(arguments['source'])})"
    tables: list[Table] = []

    def lead() -> tuple[Any, ...]:
        table = load()
        tables.append(table)
        return table.path, table._rules, table.plan, table.receipt, table._client_max_bytes

    digests = {
        key: hashlib.blake2b(_text(value).encode(), digest_size=8).hexdigest() for key, value in arguments.items()
    }
    path, rules, plan, receipt, client_max_bytes = from_rank_0(lead, what=what, arguments=digests)
    mine = tables[0] if tables else None
    if path is None:
        held = mine._row_groups if mine is not None else None
        rows = broadcast_rows(held.table if isinstance(held, CollectedRowGroups) else None, what=what)
        return mine if mine is not None else Table(CollectedRowGroups(rows), rules, plan=plan, receipt=receipt)

    def follow() -> Table:
        manifest = _seen(Path(path))
        return Table.exported(Path(path), manifest, rules, plan=plan, client_max_bytes=client_max_bytes)

    return on_every_rank(lambda: mine if mine is not None else follow(), what=f"{what}: its export")


def _seen(folder: Path) -> Manifest:
    """Return what an export holds when its marker and all its shards are there.

    Raises:
        VolumeError: They are not within SEEN_S, or cannot be read.
    """
    storage = LocalStorage(folder)
    deadline = time.monotonic() + SEEN_S
    try:
        while (marker := read_marker(storage)) is None:
            if time.monotonic() > deadline:
                raise VolumeError(f"{folder} shows no marker within {SEEN_S:g} s.")
            time.sleep(0.05)
        wait_for_files(storage, marker.sizes, timeout_s=SEEN_S)
    except OSError as exc:
        raise VolumeError(
            f"rank {rank()} does not see what rank 0 exported: {exc}\n"
            "  Every rank needs the same volume at the same path."
        ) from exc
    return Manifest.from_json(marker.body, folder)


def _text(value: Any) -> str:
    """Return what is equal on two ranks where an argument is."""
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, Mapping):
        return str(sorted((_text(key), _text(of)) for key, of in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return str([_text(one) for one in value])
    has_text = value is None or isinstance(value, str | bytes | int | float | Policy)
    has_text = has_text or is_dataclass(value) or type(value).__module__ == "datetime"
    return repr(value) if has_text else f"a {type(value).__name__}"
