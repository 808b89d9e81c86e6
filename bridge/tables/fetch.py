"""Carrying out a plan: collect under a ceiling, or export."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from bridge.columns.rules import Rules
from bridge.display import format_bytes, format_count
from bridge.errors import TableTooLargeError, VolumeError
from bridge.progress import progress_bar
from bridge.spark.read import stream_batches
from bridge.spark.source import Source
from bridge.tables.prepare import Prepared
from bridge.tables.publish import bind, export_folder, write_export
from bridge.tables.receipt import make_receipt
from bridge.tables.table import Table

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
    source, plan = prepared.source, prepared.plan
    receipt = make_receipt(source, prepared.connection)
    rows = _collect_rows(source, plan.max_bytes, prepared.size.num_rows, prepared.settings.progress)
    rules = prepared.rules.bound(lambda: [rows])
    receipt |= {"route": "collect", "num_rows": rows.num_rows, "policies": rules.to_json()}
    return Table.collected(rows, rules, plan=plan, receipt=receipt)


def _collect_rows(source: Source, max_bytes: int, expected_rows: int | None, show: bool | None) -> pa.Table:
    schema = source.schema
    pieces: list[pa.Table] = []
    pending: list[pa.Table] = []
    num_rows = num_bytes = pending_bytes = 0
    bar = progress_bar(f"collect {source.name}", total=expected_rows, unit=" rows", enabled=show)
    with bar, closing(stream_batches(source.frame, schema, source.name)) as batches:
        for batch in batches:
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            pending_bytes += batch.nbytes
            if num_bytes > max_bytes:
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
        folder, manifest, rules = write_export(
            prepared.source,
            prepared.connection,
            parent,
            identity=prepared.identity,
            shape=prepared.shape,
            size=prepared.size,
            rules=prepared.rules,
            facts={"num_dropped": plan.num_dropped},
            show=prepared.settings.progress,
        )
    return Table.exported(folder, manifest, rules, plan=plan, client_max_bytes=prepared.settings.client_max_bytes)


def _too_large(prepared: Prepared, told: str) -> TableTooLargeError:
    way_out = (
        'Pass volume="/Volumes/..." (needs WRITE VOLUME), name fewer columns, or limit=.'
        if prepared.auto
        else 'Name fewer columns, raise max_bytes, use limit=, or use route="export".'
    )
    return TableTooLargeError(
        f"{prepared.plan.source} {told}; max_bytes is {format_bytes(prepared.plan.max_bytes)}.\n  {way_out}"
    )
