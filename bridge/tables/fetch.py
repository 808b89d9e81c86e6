"""Carrying out a plan: collect under a ceiling, or export."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.columns.rules import Rules
from bridge.display import format_bytes, format_count
from bridge.errors import TableTooLargeError, VolumeError
from bridge.manifest import LostTimesError, Manifest, Shard, encode_schema
from bridge.progress import progress_bar
from bridge.spark.read import stream_batches
from bridge.spark.write import write_shards
from bridge.tables.prepare import Prepared
from bridge.tables.publish import bind, export_folder, publish
from bridge.tables.receipt import make_receipt
from bridge.tables.table import Table
from bridge.volumes.path import Place

# Batches as servers send them are small; they are joined to pieces of this size while they arrive, so that no moment
# needs the whole table twice.
_PIECE_BYTES = 32 << 20


def fetch(prepared: Prepared) -> Table:
    """Carry out a plan."""
    if prepared.plan.route == "export":
        return _export(prepared)
    estimate = prepared.size.num_bytes
    if prepared.size.is_exact and estimate is not None and estimate > prepared.plan.max_bytes:
        raise _too_large(prepared, f"would take about {format_bytes(estimate)}")
    try:
        return _collect(prepared)
    except _OutgrownError as exc:
        if not prepared.auto:
            raise _too_large(prepared, f"takes more than {format_bytes(prepared.plan.max_bytes)}") from exc
        ceiling = format_bytes(prepared.plan.max_bytes)
        told = f"collecting passed max_bytes, {ceiling}, after {format_count(exc.num_rows)} rows"
        width = exc.num_bytes / max(exc.num_rows, 1)
    except TableTooLargeError as exc:
        if not prepared.auto:
            raise
        told, width = str(exc).splitlines()[0], None
    return _export(
        replace(
            prepared,
            plan=replace(prepared.plan, route="export", reason=told),
            size=replace(prepared.size, row_bytes=width or prepared.size.row_bytes),
        )
    )


class _OutgrownError(Exception):
    """A collect passed its ceiling and was stopped."""

    def __init__(self, num_rows: int, num_bytes: int) -> None:
        super().__init__(num_rows, num_bytes)
        self.num_rows = num_rows
        self.num_bytes = num_bytes


def _collect(prepared: Prepared) -> Table:
    receipt = make_receipt(prepared.source, prepared.connection)
    rows = _collect_rows(prepared)
    rules = prepared.rules.bound(lambda: [rows])
    receipt |= {"route": "collect", "num_rows": rows.num_rows, "policies": rules.to_json()}
    return Table.collected(rows, rules, plan=prepared.plan, receipt=receipt)


def _collect_rows(prepared: Prepared) -> pa.Table:
    source, expected, show = prepared.source, prepared.size.num_rows, prepared.settings.progress
    schema = source.schema
    pieces: list[pa.Table] = []
    pending: list[pa.Table] = []
    num_rows = num_bytes = pending_bytes = 0
    bar = progress_bar(f"collect {source.name}", total=expected, unit=" rows", enabled=show)
    with bar, closing(stream_batches(source.frame, schema, source.name)) as batches:
        for batch in batches:
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            pending_bytes += batch.nbytes
            if num_bytes > prepared.plan.max_bytes:
                raise _OutgrownError(num_rows, num_bytes)
            pending.append(batch)
            if pending_bytes >= _PIECE_BYTES:
                pieces.append(pa.concat_tables(pending).combine_chunks())
                pending, pending_bytes = [], 0
            bar.update(batch.num_rows)
    if pending:
        pieces.append(pa.concat_tables(pending).combine_chunks())
    return pa.concat_tables(pieces) if pieces else schema.empty_table()


def _export(prepared: Prepared) -> Table:
    if prepared.volume is None:
        if not prepared.auto:
            raise VolumeError(
                f"{prepared.plan.source} has nowhere to be exported to.\n"
                '  Pass volume="/Volumes/..." (needs WRITE VOLUME), or set BRIDGE_VOLUME.'
            )
        estimate, ceiling = prepared.size.num_bytes or 0, prepared.plan.max_bytes
        about = f"would take about {format_bytes(estimate)}"
        raise _too_large(prepared, about if estimate > ceiling else f"takes more than {format_bytes(ceiling)}")
    parent = export_folder(prepared.volume, prepared.source.name)
    # what others completed while this was measured is as good
    found = prepared.reusable or prepared.reuse.find(parent, prepared.identity)
    plan = prepared.plan
    if found is not None:
        folder, manifest = found
        plan = replace(plan, reuses=str(folder), reuse_reason=f"reused: {folder}")
        rules = Rules.from_json(manifest.schema, manifest.receipt["policies"])
        if not rules.fulfils(prepared.rules):
            rules = bind(folder, manifest, prepared.rules)
    else:
        why = prepared.reuse.why_new(parent, prepared.identity, prepared.source.pin.version)
        plan = replace(plan, reuse_reason=plan.reuse_reason or why)
        folder, manifest, rules = _written(prepared, parent)
    return Table.exported(folder, manifest, rules, plan=plan, client_max_bytes=prepared.settings.client_max_bytes)


def _written(prepared: Prepared, parent: Place) -> tuple[Path, Manifest, Rules]:
    """Write a new export under `parent`; on failure nothing is left. The rules hold what dictionaries were found."""
    source, identity, size = prepared.source, prepared.identity, prepared.size
    schema, show = source.schema, prepared.settings.progress
    facts = {"num_dropped": prepared.plan.num_dropped, "route": "export"}
    receipt = {**make_receipt(source, prepared.connection), **facts}

    def described(shards: tuple[Shard, ...], folder: Path) -> Manifest:
        num_rows = sum(shard.num_rows for shard in shards)
        width = size.row_bytes if size.row_bytes is not None else _measured_width(folder, shards)
        manifest = Manifest(
            table=source.name,
            version=source.pin.version,
            identity=identity.key,
            query=identity.query,
            schema_ipc=encode_schema(schema),
            num_rows=num_rows,
            num_bytes=sum(shard.num_bytes for shard in shards),
            memory_bytes=round(num_rows * width),
            shards=shards,
            receipt={**receipt, "num_rows": num_rows},
        )
        policies = bind(folder, manifest, prepared.rules).to_json()
        return replace(manifest, receipt={**manifest.receipt, "policies": policies})

    def attempt(*, as_integers: bool) -> tuple[Path, Manifest, Rules]:
        write = partial(write_shards, source, shape=prepared.shape, size=size, as_integers=as_integers, show=show)
        label, by_server = identity.key or "unpinned", source.engine.spark_writes
        folder, manifest = publish(parent, label, source.name, schema, write, described, by_server=by_server, show=show)
        return folder, manifest, Rules.from_json(schema, manifest.receipt["policies"])

    try:
        return attempt(as_integers=False)
    except LostTimesError:
        return attempt(as_integers=True)


def _measured_width(folder: Path, shards: Sequence[Shard]) -> float:
    """Return the mean Arrow bytes of a row of the first row group."""
    for shard in shards:
        if shard.num_rows:
            rows: Any = pq.ParquetFile(folder / shard.name).read_row_group(0)
            return float(rows.nbytes / rows.num_rows)
    return 0.0


def _too_large(prepared: Prepared, told: str) -> TableTooLargeError:
    way_out = (
        'Pass volume="/Volumes/..." (needs WRITE VOLUME), name fewer columns, or limit=.'
        if prepared.auto
        else 'Name fewer columns, raise max_bytes, use limit=, or use route="export".'
    )
    return TableTooLargeError(
        f"{prepared.plan.source} {told}; max_bytes is {format_bytes(prepared.plan.max_bytes)}.\n  {way_out}"
    )
