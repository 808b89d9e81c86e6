"""Policies: what may be done to a column that a target could not hold as it is. Pure.

A policy changes the column itself, so that all hand-offs of a table agree: its Arrow values or, where Arrow has no type
for what is wanted (a jagged tensor, a local path), a mark on its field, which the hand-offs read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from bridge.columns.decimals import decimals_to_floats
from bridge.columns.fills import KINDS, ZEROS, checked_fill, fill_as_json
from bridge.errors import LossyConversionError, PolicyError

Column = tuple[pa.Field, pa.ChunkedArray]

# how arrow_schema marks pyspark.ml's vectors
VECTOR = "vector"
_MARK = b"bridge"


@dataclass(frozen=True, repr=False)
class Policy:
    """What may be done to a column; made by the functions of `bridge` that bear the policies' names."""

    name: ClassVar[str]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(repr(value) for value in asdict(self).values())})"

    def to_json(self) -> dict[str, Any]:
        """Return the policy as it stands in a receipt."""
        return {"policy": self.name, **asdict(self)}

    @staticmethod
    def from_json(body: dict[str, Any]) -> Policy:
        """Return the policy that a receipt tells of."""
        values = dict(body)
        known = {policy.name: policy for policy in Policy.__subclasses__()}
        kind = known.get(values.pop("policy"))
        if kind is None or not values.keys() <= {field.name for field in fields(kind)}:
            raise PolicyError(
                f"the policy {body['policy']!r} is not known as {body}.\n  Upgrade spark-training-bridge."
            )
        return kind(**values)

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        """Return what the column becomes, itself first; as it is where Spark has done what the policy says.

        Raises:
            LossyConversionError: It holds a value that does not fit.
            PolicyError: The policy is not for columns of that type.
        """
        return [(field, column)]

    def refuse(self, field: pa.Field, wanted: str) -> PolicyError:
        """Return the error for a column of a type that the policy is not for."""
        return PolicyError(f"column {field.name!r} is {field.type}; {self} is for {wanted}.")


def mark_of(field: pa.Field) -> str:
    """Return how a column is to be handed over, "" where as its type says."""
    mark: bytes = (field.metadata or {}).get(_MARK, b"")
    return mark.decode()


def marked(field: pa.Field, mark: str) -> pa.Field:
    """Return the field with a mark."""
    return field.with_metadata({_MARK: mark.encode()})


@dataclass(frozen=True, repr=False)
class Cast(Policy):
    """Numbers of another type. Integers must be exact in it, floats and decimals are rounded, nothing overflows."""

    name = "cast"
    to: str

    def __str__(self) -> str:
        return f"as_{self.to}()"

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        target, types = pa.type_for_alias(self.to), pa.types
        if not (types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)):
            raise self.refuse(field, "numbers")
        wider = (
            f"{ways_out(field.name, 'as_float64()')}."
            if self.to != "float64"
            else f"{ways_out(field.name, 'fill(...)', 'mask()')} for nulls."
        )
        try:
            is_rounded = types.is_decimal(field.type) and types.is_floating(target)
            cast = (decimals_to_floats(column) if is_rounded else column).cast(target)
        except pa.ArrowInvalid as exc:  # whose text holds the value
            raise LossyConversionError(
                f"column {field.name!r} ({field.type}) holds numbers that {self.to} cannot hold exactly.\n{wider}"
            ) from exc
        if types.is_floating(target):
            lost = pc.sum(pc.is_inf(cast)).as_py() or 0
            lost -= (pc.sum(pc.is_inf(column)).as_py() or 0) if types.is_floating(field.type) else 0
            if lost:
                raise LossyConversionError(
                    f"column {field.name!r} ({field.type}) holds {lost:,} values too large for {self.to}; they would "
                    f"become infinite.\n{wider}"
                )
        return [(pa.field(field.name, target), cast)]


@dataclass(frozen=True, repr=False)
class Fill(Policy):
    name = "fill"
    value: Any

    def to_json(self) -> dict[str, Any]:
        """Return the policy as it stands in a receipt: what JSON does not have as text, from which `apply` reads it."""
        return {"policy": self.name, "value": fill_as_json(self.value)}

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        try:
            scalar = pa.scalar(checked_fill(self.value, field.type), field.type)
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as exc:
            raise PolicyError(
                f"column {field.name!r} is {field.type}, which cannot hold {self.value!r} exactly: {exc}."
            ) from exc
        return [(field, _filled(column, scalar))]


@dataclass(frozen=True, repr=False)
class Mask(Policy):
    name = "mask"

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        kind = next((kind for kind, is_kind in KINDS.items() if is_kind(field.type)), dict)
        if kind is dict:
            raise self.refuse(field, "columns of single values and arrays")
        zero = pa.scalar(ZEROS[kind], field.type)
        there = pa.field(f"{field.name}__valid", pa.bool_())
        return [(field, _filled(column, zero)), (there, column.is_valid())]


@dataclass(frozen=True, repr=False)
class DropNulls(Policy):
    name = "drop_nulls"


@dataclass(frozen=True, repr=False)
class ToJson(Policy):
    name = "to_json"


@dataclass(frozen=True, repr=False)
class Dictionary(Policy):
    name = "dictionary"
    values: list[str] | None = None

    def __str__(self) -> str:
        return "dictionary()"

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        if not pa.types.is_string(field.type):
            raise self.refuse(field, "strings")
        known = pa.array(self.values or [], pa.string())
        codes = pc.index_in(column, value_set=known)
        if codes.null_count != column.null_count:
            raise LossyConversionError(f"column {field.name!r} holds values that its dictionary does not.")
        chunks = [pa.DictionaryArray.from_arrays(chunk, known) for chunk in codes.chunks]
        arrow = pa.dictionary(pa.int32(), pa.string())
        return [(pa.field(field.name, arrow), pa.chunked_array(chunks, arrow))]


@dataclass(frozen=True, repr=False)
class Flatten(Policy):
    name = "flatten"

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        """Take it apart; a NULL struct is NULL in each field."""
        if not pa.types.is_struct(field.type):
            raise self.refuse(field, "structs")
        children = [child.with_name(f"{field.name}.{child.name}") for child in field.type]
        return list(zip(children, column.flatten(), strict=True))


@dataclass(frozen=True, repr=False)
class FixedSize(Policy):
    name = "fixed_size"
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise PolicyError(f"fixed_size was given {self.size!r}; give a whole number, 1 or more.")

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        if not pa.types.is_list(field.type):
            raise self.refuse(field, "arrays")
        arrow = pa.list_(field.type.value_type, self.size)
        lengths = pc.unique(pc.list_value_length(column)).drop_null().to_pylist()
        if lengths not in ([], [self.size]):
            raise LossyConversionError(
                f"column {field.name!r} has arrays of {' and '.join(map(str, sorted(lengths)[:9]))} elements, not "
                f"{self.size}.\n"
                f"{ways_out(field.name, 'jagged()', 'offsets()')}."
            )
        # pyarrow's cast reads a buffer that is not there where no row of a chunk has elements
        chunks = [
            pa.nulls(len(chunk), arrow) if chunk.null_count == len(chunk) else chunk.cast(arrow)
            for chunk in column.chunks
        ]
        return [(pa.field(field.name, arrow), pa.chunked_array(chunks, arrow))]


@dataclass(frozen=True, repr=False)
class Mark(Policy):
    """A form that is given to the column when it is handed over."""

    name = "mark"
    mark: str

    def __str__(self) -> str:
        return f"{self.mark}()"

    def apply(self, field: pa.Field, column: pa.ChunkedArray) -> list[Column]:
        wanted, fits = _MARKS[self.mark]
        if not fits(field):
            raise self.refuse(field, wanted)
        return [(marked(field, self.mark), column)]


_MARKS: dict[str, tuple[str, Callable[[pa.Field], bool]]] = {
    "jagged": ("arrays", lambda field: pa.types.is_list(field.type)),
    "offsets": ("arrays", lambda field: pa.types.is_list(field.type)),
    "sparse": ("vectors of pyspark.ml", lambda field: mark_of(field) == VECTOR),
    "cached_file": ("strings", lambda field: pa.types.is_string(field.type)),
}


def as_float32() -> Policy:
    """Numbers as float32: floats and decimals are rounded to 24 bits; what overflows, or an integer beyond, raises."""
    return Cast("float32")


def as_float64() -> Policy:
    """Numbers as float64: decimals are rounded to 53 bits, an integer beyond them raises; NULL is NaN in tensors."""
    return Cast("float64")


def as_int64() -> Policy:
    """Numbers as int64; a value with a fraction, or beyond 63 bits, raises."""
    return Cast("int64")


def fill(value: Any) -> Policy:
    """`value` in the place of NULL."""
    return Fill(value)


def mask() -> Policy:
    """Zero (False, "", 1970-01-01) in the place of NULL, and a boolean column `<column>__valid` beside it."""
    return Mask()


def drop_nulls() -> Policy:
    """No rows where the column is NULL: Spark leaves them out before bytes move, and the plan shows how many."""
    return DropNulls()


def dictionary() -> Policy:
    """Category codes for strings.

    The dictionary holds all of the table's values, sorted, stands in the receipt, and is the same in every batch, rank
    and epoch: int64 codes in arrays and tensors, categories in pandas, a ClassLabel in datasets.
    """
    return Dictionary()


def to_json() -> Policy:
    """JSON text, written by Spark, for structs, maps, arrays and variants.

    The embedded engine leaves fields out that are NULL; Apache Spark writes them as null.
    """
    return ToJson()


def flatten() -> Policy:
    """A column `struct.field` for each field of a struct."""
    return Flatten()


def fixed_size(size: int) -> Policy:
    """Arrays of exactly `size` elements, handed over as [rows, size]; another length raises."""
    return FixedSize(size)


def jagged() -> Policy:
    """Arrays of varying length: jagged nested tensors in torch, an array of arrays in NumPy."""
    return Mark("jagged")


def offsets() -> Policy:
    """Arrays of varying length as (values, offsets): row i is values[offsets[i]:offsets[i + 1]]."""
    return Mark("offsets")


def sparse() -> Policy:
    """pyspark.ml's vectors as sparse COO tensors; without it they are dense."""
    return Mark("sparse")


def cached_file() -> Policy:
    """Paths of files on a volume become paths of local copies, made when rows are handed over."""
    return Mark("cached_file")


def _filled(column: pa.ChunkedArray, value: pa.Scalar) -> pa.ChunkedArray:
    return pc.coalesce(column, value) if column.null_count else column


def ways_out(name: str, policy: str, *others: str) -> str:
    """Return the line of an error that tells which policies would take the column."""
    either = f" (or {', '.join(f'bridge.{other}' for other in others)})" if others else ""
    return f'  Load it with policies={{"{name}": bridge.{policy}}}{either}'
