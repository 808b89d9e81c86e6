"""What a loader tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridge.display import format_bytes

_SMALL_SHARE = 0.05


@dataclass(frozen=True)
class Traffic:
    """Bytes that were read of a volume and of the cache, and files that were skipped."""

    volume_bytes: int = 0
    cache_bytes: int = 0
    num_skipped: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.volume_bytes + other.volume_bytes,
            self.cache_bytes + other.cache_bytes,
            self.num_skipped + other.num_skipped,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return self + Traffic(-other.volume_bytes, -other.cache_bytes, -other.num_skipped)


@dataclass
class Stats:
    """Where the time of an iteration went.

    Attributes:
        num_batches: Batches that the loop got.
        wait_s: Seconds in which the loop waited for batches.
        compute_s: Seconds between a batch and the request for the next.
        traffic: Bytes that were read for it, also ahead.
        remedy: What to do where it waits.
    """

    num_batches: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    remedy: str = ""

    @property
    def wait_share(self) -> float:
        """The part of the time in which the loop waited, from 0 to 1."""
        total = self.wait_s + self.compute_s
        return self.wait_s / total if total else 0.0

    @property
    def advice(self) -> str:
        """One sentence: what to change, if anything."""
        if not self.num_batches:
            return "Nothing was iterated over yet."
        if self.wait_share < _SMALL_SHARE:
            return f"The training step sets the pace: {self.wait_share:.0%} of the time went into waiting for batches."
        return f"The loop waited {self.wait_share:.0%} of the time: {self.remedy}."

    def __str__(self) -> str:
        read = (
            f"{format_bytes(self.traffic.volume_bytes)} read, {format_bytes(self.traffic.cache_bytes)} from the cache"
        )
        skipped = f", {self.traffic.num_skipped} files skipped" if self.traffic.num_skipped else ""
        times = f"waited {self.wait_s:.1f} s, computed {self.compute_s:.1f} s"
        return f"{self.num_batches} batches: {times}; {read}{skipped}\n  {self.advice}"
