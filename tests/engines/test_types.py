"""Every Spark type, with and without nulls, by both routes into every hand-off, against what Spark itself says.

Each table is loaded once with a column of each type, and all hand-offs are tried on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import bridge
from bridge.columns.rules import Rules
from tests.typed import KINDS, PATTERNS, TIMES, Kind, references, seen, select

POLICIES = {
    "jagged": bridge.jagged(),
    "offsets": bridge.offsets(),
    "fixed_size": bridge.fixed_size(3),
    "flatten": bridge.flatten(),
    "to_json": bridge.to_json(),
}
GIVEN = {kind.source: POLICIES[kind.policy] for kind in KINDS if kind.policy}
BY_NAME = {kind.name: kind for kind in KINDS}


class Loaded:
    """A table with what Spark says of it; `featured` has only what datasets takes."""

    def __init__(self, engine: Any, kinds: list[Kind], frame: Any, **arguments: Any) -> None:
        policies = {name: policy for name, policy in GIVEN.items() if name in {kind.source for kind in kinds}}
        carried = dict.fromkeys(kind.source for kind in kinds if "huggingface" not in kind.refused)
        some = {name: policy for name, policy in policies.items() if name in carried}
        arguments["spark"] = frame.sparkSession
        self.right = references(frame, kinds)
        self.table = bridge.load_table(frame, policies=policies, **arguments)
        self.featured = bridge.load_table(frame, columns=["row", *carried], policies=some, **arguments)
        self.arrow = self.table.to_arrow()
        self.order = np.argsort(self.arrow["row"].to_numpy())

    @cached_property
    def pandas(self) -> Any:
        return self.table.to_pandas()

    @cached_property
    def pandas_arrow(self) -> Any:
        return self.table.to_pandas("pyarrow")

    @cached_property
    def map_style(self) -> list[Any]:
        return list(self.featured.to_huggingface(streaming=False))

    @cached_property
    def streaming(self) -> list[Any]:
        return list(self.featured.to_huggingface(streaming=True))

    def only(self, name: str) -> bridge.Table:
        """Return the table with one column, so that another's error does not hide it."""
        rows = self.arrow.select([name])
        assert self.table.plan is not None
        return bridge.Table.collected(rows, Rules(rows.schema, {}), plan=self.table.plan, receipt=self.table.receipt)


@pytest.fixture(scope="module")
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    made: dict[Any, Loaded | None] = {}

    def load(engine: Any, route: str, pattern: str) -> Loaded:
        key = engine.name, route, pattern
        if key not in made:
            made[key] = None
            frame = engine.spark.sql(select(KINDS, pattern))
            made[key] = Loaded(engine, KINDS, frame, route=route, volume=tmp_path_factory.mktemp("exports"))
        loaded = made[key]
        assert loaded is not None, "it could not be loaded: see the first error"
        return loaded

    return load


@pytest.fixture(params=list(PATTERNS))
def pattern(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def loaded(_loaded: Any, engine: Any, route: str, pattern: str) -> Loaded:
    return _loaded(engine, route, pattern)


# --- hand-offs, one column each, in the order of the rows as they came


def _pandas(loaded: Loaded, name: str) -> Any:
    return list(loaded.pandas[name].array)


def _pandas_arrow(loaded: Loaded, name: str) -> Any:
    return list(loaded.pandas_arrow[name].array)


def _rows(values: Any, offsets: Any) -> list[Any]:
    bounds = [int(bound) for bound in offsets]
    assert bounds[-1] == len(values)
    return [values[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def _numpy(loaded: Loaded, name: str) -> Any:
    values = loaded.only(name).to_numpy()[name]
    if isinstance(values, tuple):
        return _rows(*values)
    assert isinstance(values, np.ndarray)
    return list(values) if values.dtype.kind in "mM" or values.dtype == object else values.tolist()


def _torch(loaded: Loaded, name: str) -> Any:
    return _listed(loaded.only(name).to_torch()[name])


def _listed(values: Any) -> Any:
    if isinstance(values, tuple):
        return [row.tolist() for row in _rows(*values)]
    if isinstance(values, dict):
        columns = {key: _listed(part) for key, part in values.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(values, torch.Tensor) and values.is_nested:
        return [row.tolist() for row in values.unbind()]
    return values.tolist() if isinstance(values, torch.Tensor) else values


def _map_style(loaded: Loaded, name: str) -> Any:
    if "huggingface" in BY_NAME[name].refused:
        return loaded.only(name).to_huggingface(streaming=False)
    return [row[name] for row in loaded.map_style]


def _streaming(loaded: Loaded, name: str) -> Any:
    if "huggingface" in BY_NAME[name].refused:
        return loaded.only(name).to_huggingface(streaming=True)
    return [row[name] for row in loaded.streaming]


HAND_OFFS: dict[str, tuple[Any, str]] = {
    "to_pandas": (_pandas, "pandas"),
    "to_pandas of Arrow": (_pandas_arrow, "pyarrow"),
    "to_numpy": (_numpy, "numpy"),
    "to_torch": (_torch, "torch"),
    "to_huggingface": (_map_style, "huggingface"),
    "to_huggingface, streaming": (_streaming, "huggingface"),
}
# where NaN is the only null that floats have
NAN_IS_NULL = {"pandas", "numpy", "torch"}
NULLS = {"some nulls", "all nulls"}
VALUES = {"no nulls", "some nulls"}


def _is_error(kind: Kind, target: str, pattern: str) -> bool:
    return (
        target in kind.refused
        or (target in kind.no_nulls and pattern in NULLS)
        or (target in kind.not_these and pattern in VALUES)
    )


def _right(loaded: Loaded, kind: Kind, target: str) -> list[Any]:
    """Return Spark's word; NULL as NaN where a float has no other null."""
    right = loaded.right[kind.name]
    if target not in NAN_IS_NULL or "float" not in str(kind.form) or kind.form[0] == "struct":
        return right
    return [_nan(kind.form, value) for value in right]


def _nan(form: Any, value: Any) -> Any:
    if isinstance(form, str):
        return "NaN" if value is None else value
    return value and [_nan(form[1], element) for element in value]


@pytest.mark.parametrize("hand_off", HAND_OFFS)
def test_values_are_sparks_or_an_error_names_the_column(loaded: Loaded, pattern: str, hand_off: str) -> None:
    give, target = HAND_OFFS[hand_off]
    wrong = {}
    for kind in KINDS:
        told = _fault(loaded, kind, pattern, give, target)
        if told is not None:
            wrong[kind.name] = told
    assert not wrong, "\n".join(f"{name}, {pattern}, {hand_off}: {told}" for name, told in wrong.items())


def _fault(loaded: Loaded, kind: Kind, pattern: str, give: Any, target: str) -> str | None:
    """Return what is wrong with a column as it was handed over."""
    is_error = _is_error(kind, target, pattern)
    try:
        values = give(loaded, kind.name)
    except bridge.LossyConversionError as exc:
        names_all = f"column '{kind.name}" in str(exc) and "bridge." in str(exc)
        return None if is_error and names_all else f"raised {exc}"
    except Exception as exc:  # noqa: BLE001 - one column's error is not to hide the others'
        return f"raised {exc!r}"
    if is_error:
        return f"gave {values!r:.300}, not an error"
    right = _right(loaded, kind, target)
    try:
        got = [seen(kind.form, values[index], nan_is_null=target in NAN_IS_NULL) for index in loaded.order]
    except (AssertionError, TypeError, ValueError, AttributeError) as exc:
        return f"gave {values!r:.300}: {exc!r}"
    differ = [(a, b) for a, b in zip(got, right, strict=True) if a != b]
    return f"gave {differ[0][0]!r:.200} for {differ[0][1]!r:.200}" if differ else None
