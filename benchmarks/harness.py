"""Measure several ways to do the same work, so that the figures survive a machine that others use too.

The ways ("contenders") take turns in rotated order; what counts is the median of the ratios within rounds, since the
two halves of a ratio then saw the same weather. A contender that gives another result than the reference voids the
measurement.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Contender = Callable[[], Any]

# `bridge` itself is asked by import: a checkout need not be installed.
_LIBRARIES = ("datasets", "numpy", "pandas", "pyarrow", "pysail", "pyspark", "pyspark-client", "torch")

_CHILD_TIMEOUT_S = 300


class MismatchError(ValueError):
    """A contender did other work than the reference."""


class ChildError(RuntimeError):
    """A process that was to be measured failed."""


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, and how far they reach."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Comparison:
    """Seconds of every contender, one for each round, in the order of the rounds."""

    reference: str
    seconds: Mapping[str, Sequence[float]]

    def spread(self, name: str) -> Spread:
        """Return the seconds that `name` took."""
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, *, to: str | None = None) -> Spread:
        """Return the seconds of `name` over those of `to` (default: the reference) in the same round: 0.5 is half."""
        pairs = zip(self.seconds[name], self.seconds[to or self.reference], strict=True)
        return Spread.of([mine / other for mine, other in pairs])

    def difference(self, name: str, *, to: str | None = None) -> Spread:
        """Return the seconds that `name` took more than `to` (default: the reference) in the same round."""
        pairs = zip(self.seconds[name], self.seconds[to or self.reference], strict=True)
        return Spread.of([mine - other for mine, other in pairs])


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """Return `names` in the order of a round: A B C, then B C A, then C A B."""
    start = round_number % len(names)
    return [*names[start:], *names[:start]]


def differs(expected: Any, found: Any) -> str | None:
    """Return what makes two results different, None where they are equal: the check that `compare` makes by default."""
    return None if expected == found else "the results are not equal"


def compare(
    contenders: Mapping[str, Contender],
    *,
    reference: str,
    rounds: int = 5,
    warm_ups: int = 1,
    check: Callable[[Any, Any], str | None] = differs,
) -> Comparison:
    """Run `contenders` in turn and return what each took.

    Results are dropped, and garbage is collected, before the next one runs. The first warm-up also checks every
    result, outside of what is timed.

    Args:
        contenders: What to run, by name; see `process` for a whole process.
        reference: The contender whose result is right, and to which ratios refer.
        rounds: How often each runs and is timed, 1 or more.
        warm_ups: How often each runs before that, 1 or more.
        check: Gets the result of the reference and that of a contender; returns what differs, or None.

    Raises:
        MismatchError: A result differs from the reference's.
        ValueError: There is no such reference, or `rounds` or `warm_ups` is less than 1.
    """
    if reference not in contenders:
        raise ValueError(f"reference is {reference!r}; the contenders are {', '.join(contenders)}.")
    if rounds < 1 or warm_ups < 1:
        raise ValueError(f"rounds is {rounds} and warm_ups is {warm_ups}; give 1 or more of each.")
    _check_results(contenders, reference, check)
    for _ in range(warm_ups - 1):
        for run in contenders.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds):
        for name in rotated(list(contenders), round_number):
            seconds[name].append(_timed(contenders[name]))
    return Comparison(reference, seconds)


def _check_results(
    contenders: Mapping[str, Contender], reference: str, check: Callable[[Any, Any], str | None]
) -> None:
    expected = contenders[reference]()
    for name, run in contenders.items():
        if name != reference and (difference := check(expected, run())) is not None:
            raise MismatchError(f"{name} does not do what {reference} does, so they cannot be compared: {difference}")


def _timed(run: Contender) -> float:
    gc.collect()
    started = time.perf_counter()
    result = run()
    elapsed = time.perf_counter() - started
    del result
    return elapsed


def process(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Contender:
    """Return a contender that runs a whole process; its result is what the process prints.

    Args:
        argv: The program and its arguments.
        env: The whole environment; default: this process's.

    Raises:
        ChildError: When it is run: the process ended with another status than 0.
    """

    def run() -> str:
        return _run(argv, env).stdout

    return run


def _run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=_CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as exc:
        raise ChildError(f"{Path(argv[0]).name} had not ended after {_CHILD_TIMEOUT_S} s") from exc
    if done.returncode:
        raise ChildError(f"{Path(argv[0]).name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done


@dataclass(frozen=True)
class Child:
    """What a call gave in a process of its own, and the most memory that process ever had resident, in bytes."""

    result: Any
    peak_bytes: int


def in_child(function: str, **keywords: Any) -> Child:
    """Call a function in a fresh process and return its result with the peak memory of that process; Linux only.

    Args:
        function: "module:name"; its keywords and its result are JSON values.
        keywords: What it is called with.

    Raises:
        ChildError: The call raised.
    """
    code = "from benchmarks import harness; harness.answer_parent()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = _run([sys.executable, "-c", code, function, json.dumps(keywords)], environment)
    answer = json.loads(done.stdout.splitlines()[-1])
    return Child(answer["result"], answer["peak_bytes"])


def answer_parent() -> None:
    """Make the call that `in_child` asks for on the command line, and print its result and the peak memory."""
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    print(json.dumps({"result": result, "peak_bytes": _peak_bytes()}), flush=True)


def _peak_bytes() -> int:
    # ru_maxrss would not do: a child starts with that of the process it was forked from, and a parent's takes in that
    # of every child it waited for.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@dataclass(frozen=True)
class Bar:
    """A figure, and the most that it should be."""

    what: str
    value: float
    limit: float
    unit: str

    @property
    def verdict(self) -> str:
        """Whether the figure keeps to the limit; one that does not is missed by a part of the limit."""
        return "met" if self.value <= self.limit else f"missed by {self.value / self.limit - 1:.1%}"


@dataclass
class Report:
    """What was found out about one question: tables for people, bars, and all measurements for JSON."""

    question: str
    engine: str
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[object]]]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)

    def add_comparison(self, title: str, comparison: Comparison, *, against: Mapping[str, str] | None = None) -> None:
        """Add the figures of `comparison`.

        Args:
            title: What was compared.
            against: By contender, the one to divide it by where that is not the reference.
        """
        rows = []
        for name in comparison.seconds:
            other = (against or {}).get(name, comparison.reference)
            ratio = comparison.ratio(name, to=other)
            shown = ("", "", "", "") if name == other else (*_rounded(ratio, 2), other)
            rows.append((name, *_rounded(comparison.spread(name), 3), *shown))
        headers = ("contender", "median s", "min s", "max s", "ratio", "min", "max", "of the time of")
        self.tables.append((title, headers, rows))
        self.measurements[title] = {"reference": comparison.reference, "seconds": dict(comparison.seconds)}

    def add_table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add figures of any other form; JSON gets them as they are."""
        self.tables.append((title, headers, rows))
        self.measurements[title] = [dict(zip(headers, row, strict=True)) for row in rows]

    def __str__(self) -> str:
        from bridge.display import plain_table

        parts = [f"{self.question}, engine {self.engine}"]
        parts += [f"{title}\n{plain_table(headers, rows)}" for title, headers, rows in self.tables]
        if self.bars:
            rows = [
                (bar.what, f"{bar.value:.2f} {bar.unit}", f"{bar.limit:.2f} {bar.unit}", bar.verdict)
                for bar in self.bars
            ]
            parts.append(f"bars\n{plain_table(('figure', 'is', 'at most', 'verdict'), rows)}")
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "question": self.question,
            "engine": self.engine,
            "measurements": self.measurements,
            "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in self.bars],
        }


def _rounded(spread: Spread, digits: int) -> tuple[float, float, float]:
    return round(spread.median, digits), round(spread.least, digits), round(spread.most, digits)


def circumstances() -> dict[str, Any]:
    """Return what the figures depend on: versions, processors."""
    import bridge

    versions = {"python": platform.python_version(), "bridge": bridge.__version__}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"versions": versions, "cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.system()}


@contextlib.contextmanager
def own_folders() -> Iterator[Path]:
    """Give a temporary folder that is also the home of everything `bridge` keeps, so that no one's own is touched.

    Settings of the caller are put aside; BRIDGE_SPARK_JARS, which describes the machine, stays.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="bridge-benchmark-") as name:
        folder = Path(name)
        for variable in before:
            if variable.startswith(("BRIDGE_", "DATABRICKS_", "SPARK_REMOTE")) and variable != "BRIDGE_SPARK_JARS":
                del os.environ[variable]
        os.environ |= {
            "BRIDGE_PROGRESS": "false",
            "BRIDGE_WAREHOUSE": str(folder / "warehouse"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_DATA_HOME": str(folder / "data"),
        }
        try:
            yield folder
        finally:
            os.environ.clear()
            os.environ.update(before)
