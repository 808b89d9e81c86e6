"""Which policies apply to which columns of a table, and their application. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge.columns.fills import KINDS
from bridge.columns.policies import (
    VECTOR,
    Column,
    Dictionary,
    DropNulls,
    Fill,
    Mask,
    Policy,
    ToJson,
    mark_of,
)
from bridge.columns.vectors import dense_vectors
from bridge.display import did_you_mean
from bridge.errors import PolicyError

Policies = Mapping[Any, Policy | Sequence[Policy]]

_MOST_VALUES = 1_000_000


class Rules:
    """The policies of a table whose rows come in `source`; `schema` is what they become.

    Attributes:
        source: The types before any policy.
        policies: The policies of each column, by its name; a part of a struct that is flattened may have some too.
    """

    def __init__(self, source: pa.Schema, policies: Mapping[str, tuple[Policy, ...]]) -> None:
        self.source = source
        self.policies = dict(policies)

    @classmethod
    def choose(cls, source: pa.Schema, given: Policies | None) -> Rules:
        """Return the rules that a caller asks for, checked against the types.

        Args:
            source: The types of the rows.
            given: By column name, or by a type of Python for all such columns (`str`, `Decimal`, ...): a policy, or
                several in the order in which they are to be applied.

        Raises:
            PolicyError: A key is no column and no type, a value no policy, or a policy is not for its column's type.
        """
        by_key = _checked(given)
        rules = cls(source, {})
        seen: set[str] = set()

        def find(field: pa.Field) -> tuple[Policy, ...]:
            seen.add(field.name)
            if field.name not in rules.policies:
                # a vector is a struct to Arrow alone
                is_kind = mark_of(field) != VECTOR
                kinds = [kind for kind in by_key if isinstance(kind, type) and is_kind and KINDS[kind](field.type)]
                rules.policies[field.name] = by_key.get(field.name) or (by_key[kinds[0]] if kinds else ())
            return rules.policies[field.name]

        rules.apply(source.empty_table(), find)
        rules.policies = {name: policies for name, policies in rules.policies.items() if policies}
        for key in by_key:
            if isinstance(key, str) and key not in seen:
                raise PolicyError(f"policies names {key!r}, which is no column.{did_you_mean(key, seen)}")
        return rules

    @classmethod
    def choose_for_files(cls, source: pa.Schema, given: Policies | None) -> Rules:
        """Return the rules for rows that Spark has written."""
        if any(by_spark(given)):
            raise PolicyError("drop_nulls() and to_json() are done by Spark: export the table with them.")
        return cls.choose(source, given)

    @classmethod
    def from_json(cls, source: pa.Schema, body: Mapping[str, list[dict[str, Any]]]) -> Rules:
        """Return the rules that a receipt tells of."""
        return cls(source, {name: tuple(map(Policy.from_json, policies)) for name, policies in body.items()})

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return the policies as they stand in a receipt, dictionaries included."""
        return {name: [policy.to_json() for policy in policies] for name, policies in self.policies.items()}

    @cached_property
    def schema(self) -> pa.Schema:
        """The types of what `apply` returns."""
        return self.apply(self.source.empty_table()).schema

    @cached_property
    def changes(self) -> bool:
        """Whether `apply` does anything to rows."""
        return not self.schema.equals(self.source, check_metadata=True) or any(
            not isinstance(policy, DropNulls | ToJson) for policies in self.policies.values() for policy in policies
        )

    def narrowed(self, columns: Sequence[str]) -> Rules:
        """Return the rules without the columns of which none of `columns` is made."""
        kept = [
            field for field in self.source if set(Rules(pa.schema([field]), self.policies).schema.names) & set(columns)
        ]
        return Rules(pa.schema(kept), self.policies)

    @property
    def categories(self) -> dict[str, list[str]]:
        """The dictionaries, by column."""
        return {name: policy.values or [] for name, policy in self._dictionaries()}

    @property
    def unbound(self) -> list[str]:
        """The columns whose dictionaries are not known yet."""
        return [name for name, policy in self._dictionaries() if policy.values is None]

    def fulfils(self, asked: Rules) -> bool:
        """Return whether these are the rules `asked`, with dictionaries that it leaves open."""

        def same(mine: Policy, theirs: Policy) -> bool:
            is_open = isinstance(theirs, Dictionary) and theirs.values is None
            return mine == theirs or (is_open and isinstance(mine, Dictionary))

        mine, theirs = self.policies, asked.policies
        return mine.keys() == theirs.keys() and all(
            len(mine[name]) == len(theirs[name]) and all(map(same, mine[name], theirs[name])) for name in mine
        )

    def bound(self, rows: Callable[[], Iterable[pa.Table]]) -> Rules:
        """Return the rules with dictionaries that hold what occurs in the rows, in the order of code points."""
        found = {name: pa.array([], pa.string()) for name in self.unbound}
        if not found:
            return self
        before = self._before_dictionaries()
        for table in rows():
            made = before.apply(table.select(before.source.names))
            for name, known in found.items():
                values = pc.unique(pa.chunked_array([known, *made.column(name).chunks])).drop_null()
                found[name] = values
                if len(values) > _MOST_VALUES:
                    raise PolicyError(
                        f"column {name!r} holds more than {_MOST_VALUES:,} values, too many for dictionary().\n"
                        "  Hash or encode it in Spark."
                    )
        policies = {
            name: tuple(
                Dictionary(sorted(found[name].to_pylist()))
                if isinstance(policy, Dictionary) and policy.values is None
                else policy
                for policy in policies
            )
            for name, policies in self.policies.items()
        }
        return Rules(self.source, policies)

    def apply(self, table: pa.Table, find: Callable[[pa.Field], tuple[Policy, ...]] | None = None) -> pa.Table:
        """Return the rows as the policies make them. Only columns that a policy changes are copied.

        Raises:
            LossyConversionError: A value does not fit what its policy makes of it.
            PolicyError: A policy is not for its column's type, or two columns would have one name.
        """
        find = find or (lambda field: self.policies.get(field.name, ()))
        made: list[Column] = []
        for field, column in zip(self.source, table.columns, strict=True):
            made += _follow(field, column, find)
        names = Counter(field.name.lower() for field, _ in made)
        for field, _ in made:
            if names[field.name.lower()] > 1:
                raise PolicyError(
                    f"two columns would be named {field.name!r} (without regard to case).\n"
                    "  Rename one in a DataFrame, and load that."
                )
        return pa.Table.from_arrays([column for _, column in made], schema=pa.schema([field for field, _ in made]))

    def _dictionaries(self) -> Iterator[tuple[str, Dictionary]]:
        for name, policies in self.policies.items():
            yield from ((name, policy) for policy in policies if isinstance(policy, Dictionary))

    def _before_dictionaries(self) -> Rules:
        """Return the rules that give the columns which are to have dictionaries, and need no other columns."""
        unbound = self.unbound
        needed = [field for field in self.source if any(f"{name}.".startswith(f"{field.name}.") for name in unbound)]
        policies = {
            name: tuple(itertools.takewhile(lambda policy: not isinstance(policy, Dictionary), given))
            for name, given in self.policies.items()
        }
        return Rules(pa.schema(needed), policies)


def _checked(given: Any) -> dict[Any, tuple[Policy, ...]]:
    """Return the policies that were given for each column or type."""
    if not isinstance(given or {}, Mapping):
        raise PolicyError(f'policies is {given!r}; give a dict: {{"column": bridge.fill(0)}}.')
    return {key: _checked_one(key, value) for key, value in (given or {}).items()}


def _checked_one(key: Any, value: Any) -> tuple[Policy, ...]:
    if not isinstance(key, str) and key not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise PolicyError(f"policies has the key {key!r}; give the name of a column, or one of the types {known}.")
    policies = (value,) if isinstance(value, Policy) else value
    if not (isinstance(policies, Sequence) and policies and all(isinstance(policy, Policy) for policy in policies)):
        if callable(value):
            raise PolicyError(f"policies[{key!r}] is a function; call it: bridge.{value.__name__}().")
        raise PolicyError(f"policies[{key!r}] is {value!r}; give a policy as bridge.fill(0), or a list of them.")
    return tuple(policies)


def by_spark(given: Policies | None) -> tuple[list[str], list[str]]:
    """Return the columns of which Spark is to drop NULL rows, and those which it is to turn to JSON."""
    drop: list[str] = []
    to_json: list[str] = []
    for key, policies in _checked(given).items():
        for policy in policies:
            if isinstance(policy, DropNulls | ToJson):
                if not isinstance(key, str):
                    raise PolicyError(f"{policy} is done by Spark before types are known: name its columns.")
                (drop if isinstance(policy, DropNulls) else to_json).append(key)
        if key in drop and any(isinstance(policy, Fill | Mask) for policy in policies):
            raise PolicyError(f"policies[{key!r}] both drops the rows where it is NULL and keeps them: choose one.")
    return sorted(drop), sorted(to_json)


def _follow(field: pa.Field, column: pa.ChunkedArray, find: Callable[[pa.Field], tuple[Policy, ...]]) -> list[Column]:
    beside: list[Column] = []
    for policy in find(field):
        (first, changed), *more = policy.apply(field, column)
        if first.name != field.name:  # taken apart: each part may have policies of its own
            return [made for part in [(first, changed), *more] for made in _follow(*part, find)] + beside
        field, column = first, changed
        beside += more
    if mark_of(field) == VECTOR:
        field, column = pa.field(field.name, pa.list_(pa.float64())), dense_vectors(column, field.name)
    return [(field, column), *beside]
