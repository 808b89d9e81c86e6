"""Exports made without Spark, as `export_table` leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.manifest import Manifest, Shard, describe_shard, encode_schema
from bridge.volumes.commit import begin
from bridge.volumes.stores import LocalStorage


def make_export(
    parent: Path, shards: Sequence[pa.Table], *, row_group_rows: int = 100, label: str = "unpinned", **facts: Any
) -> tuple[Path, Manifest]:
    """Write each table as a shard of a new complete export in `parent`; return its folder and manifest."""
    names = [f"part-{index:05d}.parquet" for index in range(len(shards))]
    with begin(LocalStorage(parent), label) as attempt:
        folder = parent / attempt.name
        folder.mkdir()
        for name, table in zip(names, shards, strict=True):
            pq.write_table(table, folder / name, row_group_size=row_group_rows, compression="zstd")
        described = tuple(describe_shard(folder / name, shards[0].schema) for name in names)
        memory_bytes = sum(table.nbytes for table in shards)
        facts = {"identity": label, "memory_bytes": memory_bytes, **facts}
        manifest = make_manifest(described, shards[0].schema, **facts)
        attempt.commit(manifest.to_json(), {shard.name: shard.num_bytes for shard in described})
    return folder, manifest


def make_manifest(shards: Sequence[Shard], schema: pa.Schema, **facts: Any) -> Manifest:
    """Return the manifest of shards, with facts in place of those of a table that there is none of."""
    return Manifest(
        **{
            "table": "main.ml.t",
            "version": 3,
            "identity": None,
            "query": {"columns": schema.names, "where": None, "limit": None, "user": "someone"},
            "schema_ipc": encode_schema(schema),
            "num_rows": sum(shard.num_rows for shard in shards),
            "num_bytes": sum(shard.num_bytes for shard in shards),
            "memory_bytes": 0,
            "shards": tuple(shards),
            "receipt": {"table": "main.ml.t", "version": 3, "spark_types": {}},
            **facts,
        }
    )
