"""Which saves of a run stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from bridge.volumes.commit import Attempt, complete_attempts
from bridge.volumes.storage import Storage

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Saved:
    """A complete save of a step, with what was measured at it."""

    step: int
    attempt: Attempt
    metrics: dict[str, float]
    num_bytes: int
    world_size: int


@dataclass(frozen=True)
class Retention:
    """Which saves are kept: the last to be made, those of every so many steps, and the best by a metric.

    Attributes:
        best: Name of the metric and whether "min" or "max" of it is best.
    """

    keep_last: int
    keep_every: int | None = None
    best: tuple[str, Mode] | None = None

    def doomed(self, saved: Sequence[Saved], protected: Collection[str] = ()) -> list[Saved]:
        """Return the saves that no rule keeps, the oldest first. The newest is always kept.

        Args:
            saved: Complete ones, in any order.
            protected: Names of attempts that are in use.
        """
        newest: dict[int, Saved] = {}  # of a step that was saved twice, what readers pick
        for one in sorted(saved, key=lambda one: one.attempt.rank):
            newest.setdefault(one.step, one)
        # the last to be made: after a fallback, a step may be less than that of a damaged one
        kept = set(list(newest)[: max(1, self.keep_last)])
        if self.keep_every:
            kept |= {step for step in newest if step % self.keep_every == 0}
        if (best := self.best_of(list(newest.values()))) is not None:
            kept.add(best.step)
        stay = {newest[step].attempt.name for step in kept} | set(protected)
        gone = (one for one in saved if one.attempt.name not in stay)
        return sorted(gone, key=lambda one: (one.step, one.attempt.rank))

    def best_of(self, saved: Sequence[Saved]) -> Saved | None:
        """Return the best by the metric, the earliest of equals; None where none has it."""
        if self.best is None:
            return None
        name, mode = self.best
        sign = 1 if mode == "min" else -1
        # what is not a number is never the best
        measured = [one for one in saved if one.metrics.get(name, float("nan")) == one.metrics.get(name)]
        return min(measured, key=lambda one: (sign * one.metrics[name], one.step), default=None)

    def why_no_best(self, saved: Sequence[Saved]) -> list[str]:
        """Return what to tell somebody who measured something, and not what the best is told by."""
        measured = sorted({name for one in saved for name in one.metrics})
        if self.best is None or self.best[0] in measured or not measured:
            return []
        return [f"no step has the metric {self.best[0]!r} that best= names; they have: {', '.join(measured)}"]


def list_saved(storage: Storage) -> list[Saved]:
    """Return the complete saves of a run, the newest step first, and of a step what readers pick first.

    Raises:
        VolumeError: The storage cannot be read.
    """
    found = []
    for attempt, marker in complete_attempts(storage):
        facts = marker.body.get("facts", {})
        if isinstance(step := facts.get("step"), int):
            size, world = marker.body["num_bytes"], marker.body["world_size"]
            found.append(Saved(step, attempt, facts.get("metrics", {}), size, world))
    return sorted(found, key=lambda one: (-one.step, one.attempt.rank))
