"""When two exports are the same, so that the one that is there may be taken."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.manifest import FORMAT_VERSION
from bridge.spark.connect import Connection
from bridge.spark.shape import Shape
from bridge.spark.source import Source
from bridge.tables.receipt import schema_digest

_LOOPBACK = ("sc://localhost", "sc://127.", "sc://[::1]")

_QUOTED = re.compile(r"('[^']*'|\"[^\"]*\"|`[^`]*`)")
# Spaces around these mean nothing. Not around "-": two of them start a comment.
_SYMBOLS = re.compile(r"\s*([<>=!+*/%(),])\s*")


# Under these a reader leaves out what it cannot read, and the same version gives other rows when it can.
_LEAVES_OUT = ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles")


@dataclass(frozen=True)
class Identity:
    """What was asked for, and whether an export of it may be taken again.

    `query` holds what was asked, but for the version, as JSON values. `key` is equal for two exports of the same query
    of the same version, and None where nobody can ask for the same again; it is the label of an attempt. Where not
    `is_settled`, the same key may stand for other rows tomorrow; `reason` says why, or why there is no key.
    """

    query: dict[str, Any]
    key: str | None
    is_settled: bool
    reason: str

    @classmethod
    def of(
        cls,
        source: Source,
        connection: Connection,
        shape: Shape,
        *,
        drop_nulls: list[str],
        to_json: list[str],
        is_shared: bool,
    ) -> Identity:
        """Return the identity of an export of `source`; policies that do not change the files are no part of it.

        Args:
            is_shared: Whether whoever asks so may have the rows of others who did. Row filters, column masks and
                dynamic views give each user their own.
        """
        # the same folder has several names where links lead to it, as to a warehouse whose path holds odd characters
        location = source.location
        if location is not None and location.startswith("/"):
            location = os.path.realpath(location)
        confs = connection.confs
        query = {
            "format": FORMAT_VERSION,
            "address": connection.address,
            "user": None if is_shared else connection.user,
            "time_zone": connection.time_zone,
            "confs": confs,
            "table": source.name,
            "location": location,
            "schema": schema_digest(source.schema),
            "columns": list(source.columns),
            "where": None if source.where is None else normalized(source.where),
            "limit": source.limit,
            "drop_nulls": drop_nulls,
            "to_json": to_json,
            **shape.to_json(),
        }
        pin = source.pin
        if source.is_temporary:
            return cls(query, None, False, "a DataFrame or a temporary view is exported anew each time")
        if not source.where_is_text:
            return cls(query, None, False, "a filter given as a Column is exported anew each time: give it as text")
        if pin.version is None or pin.fingerprint is None:
            # names of a server on this machine are its own
            is_near = source.engine.is_here or connection.address.startswith(_LOOPBACK)
            asked = [query, pin.version, pin.fingerprint, source.asked_at, platform.node() if is_near else None]
            return cls(query, _digest(asked), False, pin.reason)
        key = _digest([query, pin.version, pin.fingerprint])
        if not source.is_repeatable:
            return cls(query, key, False, "the filter need not give the same rows twice")
        for name in _LEAVES_OUT:
            if confs.get(name, "").lower() == "true":
                return cls(query, key, False, f"{name} is on, so rows may be left out")
        return cls(query, key, True, "")

    def differs_from(self, query: Mapping[str, Any]) -> str:
        """Return in what an export that is there is another one; "" where the query is the same."""
        if query.get("user") != self.query["user"]:
            theirs, mine = (each or "all who say shared=True" for each in (query.get("user"), self.query["user"]))
            return f"the newest that is there is for {theirs}, this is for {mine}"
        names = differing([query, self.query])
        return f"the newest that is there differs in {', '.join(names)}" if names else ""


def differing(queries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of what is not the same in all queries."""
    names = sorted({name for query in queries for name in query})
    return [name for name in names if any(query.get(name) != queries[0].get(name) for query in queries)]


def normalized(where: str) -> str:
    """Return a filter without the spaces that mean nothing, so that two spellings of it are one.

    What holds a comment or a backslash stays as it is: either may change what a quote means.
    """
    where = where.strip()
    if "\\" in where or "--" in where or "/*" in where:
        return where
    parts = _QUOTED.split(where)
    parts[::2] = [_SYMBOLS.sub(r"\1", re.sub(r"\s+", " ", part)) for part in parts[::2]]
    return "".join(parts)


def _digest(facts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
