"""Kill what writes, many times, and check each time: `make chaos`."""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.engines.export_chaos import export_round, publish_at_every_step, served_table
from tests.volumes.cache_chaos import cache_round
from tests.volumes.checkpoint_chaos import checkpoint_round
from tests.volumes.checkpoint_chaos import kill_at_every_step as save_at_every_step
from tests.volumes.commit_chaos import commit_round, contended_round, kill_at_every_step
from tests.volumes.mount import mounted_volume


def main() -> None:
    """Run the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="how many kills in all")
    parser.add_argument("--seed", type=int, help="of the first round; what a failed run printed")
    place_of = parser.add_mutually_exclusive_group()
    place_of.add_argument("--on-disk", action="store_false", dest="on_volume", help="the default")
    place_of.add_argument("--on-volume", action="store_true", help="on a FUSE volume")
    asked = parser.parse_args()
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridge-chaos-")))
        place = folder / "disk"
        if asked.on_volume:
            place = stack.enter_context(mounted_volume(folder / "mount", cache_ms=0)).path / "root"
        began = time.monotonic()
        steps = kill_at_every_step(place / "commit")
        print(f"commit: killed at each of {steps} steps", flush=True)
        # a round of the first kind kills two writers
        committed = sum(commit_round(place / "commit", seed + number) for number in range(asked.rounds // 4))
        kills = 2 * (asked.rounds // 4)
        print(
            f"commit: {kills} random kills after {committed} attempts, 0 half visible, 0 lost, no garbage", flush=True
        )
        contended = max(1, asked.rounds // 50)
        for number in range(contended):
            contended_round(place / "contended", seed + number)
        print(f"commit: {contended} slow writers beside a collector, none collected", flush=True)
        steps = publish_at_every_step(place / "published", every=5 if asked.on_volume else 1)
        print(f"exports: killed at each of {steps} steps{', but for four in five' * asked.on_volume}", flush=True)
        with served_table(folder / "served") as (remote, table):
            exported = sum(
                export_round(remote, table, place / "exports", seed + number) for number in range(asked.rounds // 10)
            )
        exporters = 2 * (asked.rounds // 10)
        print(
            f"exports: {exporters} random kills after {exported} exports, 0 half visible, 0 lost, no garbage",
            flush=True,
        )
        steps = save_at_every_step(place / "saved")
        print(f"checkpoints: killed at each of {steps} steps", flush=True)
        savers = asked.rounds // 10
        saved = sum(checkpoint_round(place / "saves" / str(number), seed + number) for number in range(savers))
        print(f"checkpoints: {savers} random kills after {saved} saves, 0 half visible, 0 lost", flush=True)
        (place / "files").mkdir()
        fetchers = asked.rounds - kills - exporters - savers
        for number in range(fetchers):
            cache_round(folder / "cache", place / "files", seed + number)
        print(f"cache: {fetchers} random kills, 0 files served in part, no garbage")
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
