"""Sail: the embedded engine, a Spark Connect server in Rust that needs no Java (https://docs.lakesail.com)."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import EngineUnavailableError, MissingDependencyError, VolumeError
from bridge.spark.channel import import_client, is_installed
from bridge.spark.engines import Pin
from bridge.spark.engines.log import ASKED, pin_from_log
from bridge.spark.engines.process import ConnectServer, free_port, serve
from bridge.spark.failures import quiet
from bridge.spark.names import quote, sql_string

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

DEFAULT_CATALOG = "main"

# Sail sends at least this many rows in one message; with its default of 8,192 a table of 150 KiB rows makes messages
# of more than a gigabyte. Collecting is as fast with 1,024.
_BATCH_ROWS = 1024

_START_TIMEOUT_S = 30.0

# Seconds after which Sail forgets a session that asks nothing, with its temporary views: by default 15 minutes, which
# is a lunch in a notebook. This server ends with its process.
_SESSION_TIMEOUT_S = 30 * 24 * 3600

# A catalog of Sail starts with one schema, which has no location: tables saved in it would go into the working
# directory. So it is one that nobody uses, and `default` is registered like the others.
_START_SCHEMA = "bridge_start"

_SAFE_PATH = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class SailEngine:
    """What Sail does differently: it writes no Parquet where rename is refused, and has no DESCRIBE HISTORY.

    `is_here` tells whether it is on this machine, so that a path means the same to both.
    """

    is_here: bool
    name: str = "sail"
    spark_writes: bool = False

    def pin(
        self, spark: SparkSession, relation: str, location: str | None, version: int | None, timestamp: str | None
    ) -> Pin:
        """Read the version from the Delta log itself, which must be on this machine."""
        if timestamp is not None:
            return Pin(None, None, "Sail resolves a timestamp without telling the version")
        pin = pin_from_log(location, version) if self.is_here else None
        if pin is None:
            told = ASKED if version is not None else "the Delta log is not here, and Sail has no DESCRIBE HISTORY"
            return Pin(version, None, told)
        return pin

    def exact_rows(self, explained: str) -> int | None:
        """Trust `Rows=Exact(n)` of the topmost node only; nodes below it stand before filters and joins."""
        physical = explained.partition("== Physical Plan ==")[2].strip().splitlines()
        found = re.search(r"statistics=\[Rows=Exact\((\d+)\)", physical[0]) if physical else None
        return int(found.group(1)) if found else None

    def spark_path(self, path: Path) -> str:
        """Return `path`, or a symbolic link to it where its name holds what Sail encodes twice (spaces, %, #, ...)."""
        if _SAFE_PATH.fullmatch(str(path)):
            return str(path)
        link = (
            Path(tempfile.gettempdir())
            / f"bridge-links-{os.getuid()}"
            / hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
        )
        link.parent.mkdir(mode=0o700, exist_ok=True)
        if link.parent.stat().st_uid != os.getuid():
            raise VolumeError(f"{link.parent} belongs to somebody else, so no link to {path} can be kept in it.")
        if not link.is_symlink():
            link.symlink_to(path, target_is_directory=True)
        return str(link)


EMBEDDED = SailEngine(is_here=True)


def start_server(warehouse: Path) -> ConnectServer:
    """Start the embedded engine, which ends with this process, and return when it answers."""
    if not is_installed("pysail"):
        raise MissingDependencyError(
            "the embedded engine needs pysail, which is not installed.\n"
            '  pip install "spark-training-bridge[local]", or connect to a server: bridge.connect("sc://host:15002").'
        )
    try:
        warehouse.joinpath(DEFAULT_CATALOG, "default").mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise EngineUnavailableError(
            f"the warehouse {warehouse} cannot be made: {exc.strerror}.\n"
            "  Set BRIDGE_WAREHOUSE to a folder you may write."
        ) from exc
    names = sorted({DEFAULT_CATALOG, *(path.name for path in _folders(warehouse))})
    catalogs = ", ".join(f'{{name="{name}", type="memory", initial_database=["{_START_SCHEMA}"]}}' for name in names)
    settings = {
        "SAIL_CATALOG__LIST": f"[{catalogs}]",
        "SAIL_CATALOG__DEFAULT_CATALOG": DEFAULT_CATALOG,
        "SAIL_EXECUTION__BATCH_SIZE": str(_BATCH_ROWS),
        "SAIL_SPARK__SESSION_TIMEOUT_SECS": str(_SESSION_TIMEOUT_S),
        "RUST_LOG": "error",
    }
    port = free_port()
    # The client takes longer to import than the server to start. Nothing else of pyspark may be imported first: two
    # threads that come to its modules by different ways fail.
    threading.Thread(target=import_client, name="bridge-import", daemon=True).start()
    return serve(
        [sys.executable, "-m", "pysail", "spark", "server", "--ip", "127.0.0.1", "--port", str(port)],
        name="the embedded engine (Sail)",
        environment=settings | os.environ,  # what the user set stands
        port=port,
        remote=f"sc://127.0.0.1:{port}",
        scratch=Path(tempfile.mkdtemp(prefix="bridge-sail-")),
        timeout_s=_START_TIMEOUT_S,
    )


def register_warehouse(spark: SparkSession, warehouse: Path) -> None:
    """Give the tables of a warehouse their names in a session: Sail's catalogs live in memory, for one session.

    A table is a folder `<warehouse>/<catalog>/<schema>/<table>`.
    """
    for catalog in _folders(warehouse):
        schemas = list(_folders(catalog))
        for schema in schemas:
            _register_schema(spark, catalog.name, schema)
        if schemas:
            spark.sql(f"DROP DATABASE {quote(catalog.name)}.{_START_SCHEMA}")


def _register_schema(spark: SparkSession, catalog: str, folder: Path) -> None:
    schema = _decoded(folder.name)
    location = sql_string(EMBEDDED.spark_path(folder))
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {quote(catalog)}.{quote(schema)} LOCATION {location}")
    for table in _folders(folder):
        name = f"{quote(catalog)}.{quote(schema)}.{quote(_decoded(table.name))}"
        provider = "DELTA" if (table / "_delta_log").is_dir() else "PARQUET"
        if provider == "PARQUET" and not any(table.glob("*.parquet")):
            if any(table.rglob("*.parquet")):
                told = "Sail would read the partition columns of its folders as text; save it as Delta"
                warnings.warn(f"{table} is not registered as {name}: {told}", RuntimeWarning, stacklevel=2)
            continue
        try:
            with quiet():
                spark.sql(f"CREATE TABLE {name} USING {provider} LOCATION {sql_string(EMBEDDED.spark_path(table))}")
        except Exception as exc:  # noqa: BLE001 - whatever is wrong with one table must not take the others' names away
            warnings.warn(f"{table} could not be registered as {name}: {exc}", RuntimeWarning, stacklevel=2)


def _folders(path: Path) -> Iterator[Path]:
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        if child.is_dir() and not child.name.startswith((".", "_")):
            yield child


def _decoded(folder_name: str) -> str:
    """Undo how Sail names the folder of a table: `a b` becomes `au+0020b`, and a smiley U+0001F600."""
    return re.sub(r"u\+([0-9A-F]{4})|U\+([0-9A-F]{8})", lambda match: chr(int(match[1] or match[2], 16)), folder_name)
