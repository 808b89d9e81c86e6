"""The receipt of a table: what was read, by whom, when, and with which versions. JSON values only."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import bridge
from bridge.spark.connect import Connection

if TYPE_CHECKING:
    from bridge.spark.source import Source

_LIBRARIES = ("pyarrow", "pyspark", "pyspark-client", "databricks-connect", "pysail", "pandas", "datasets", "torch")


def make_receipt(source: Source, connection: Connection) -> dict[str, Any]:
    """Return what can be said before rows move; `num_rows`, `route` and `policies` are added when they have."""
    return {
        "table": source.name,
        "kind": source.kind,
        "location": source.location,
        "version": source.pin.version,
        "version_reason": source.pin.reason,
        "columns": list(source.columns),
        "where": source.where,
        "limit": source.limit,
        "schema_digest": schema_digest(source.schema),
        "spark_types": spark_types(source),
        "engine": source.engine.name,
        "address": connection.address,
        "user": connection.user,
        "session_time_zone": connection.time_zone,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"bridge": bridge.__version__, **_installed()},
    }


def schema_digest(schema: pa.Schema) -> str:
    """Return what is equal for equal schemas, in hexadecimal."""
    return hashlib.blake2b(schema.serialize().to_pybytes(), digest_size=16).hexdigest()


def spark_types(source: Source) -> dict[str, str]:
    """Return the type of each column in Spark's words."""
    return {field.name: field.dataType.simpleString() for field in source.spark_schema.fields}


def _installed() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
