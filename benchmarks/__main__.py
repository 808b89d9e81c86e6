"""List the questions; measure those that are named. The figures never decide the exit status."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Report, circumstances, own_folders
from bridge.display import plain_table

# A question is a module of this package with `measure(engine=, rounds=, folder=)`.
QUESTIONS = {
    "checkpointing": "1 GiB and 6,000 tensors saved and loaded, beside raw files and torch's own; async (no engine)",
    "collect": "a mixed table of 1M rows through Spark Connect, beside toPandas and toArrow; peak memory",
    "copying": "3,000 and 15,375 files from a slow volume and on a disk, beside cp; 100,000 small files (no engine)",
    "digest": "1 GiB digested, beside a copy of memory and a read of the file",
    "exporting": "20M rows to shards, beside write.parquet or Sail's toArrow; peak memory; reuse of 1,000 shards",
    "files": "3,000 files from a slow volume: epochs beside copy_tree and the mount; 100,000 small files (no engine)",
    "handoff": "the same table to tensors and lists, beside toArrow alone, and toPandas taken on by hand; peak memory",
    "loading": "2M rows of Parquet to batches, beside decoding alone and other readers; memory; resuming (no engine)",
    "startup": "import bridge; a fresh process to its first batch of tensors (always the embedded engine)",
}
_ENGINES = ("sail", "apache")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"any of {', '.join(QUESTIONS)}")
    parser.add_argument("--engine", choices=_ENGINES, default="sail")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender is timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    given = parser.parse_args(arguments)
    if not given.questions:
        print(plain_table(("question", "what is measured"), list(QUESTIONS.items())))
        return
    if unknown := [name for name in given.questions if name not in QUESTIONS]:
        parser.error(f"no question {unknown[0]!r}; there are {', '.join(QUESTIONS)}")
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; give 1 or more")
    if given.json and not given.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {given.json.absolute().parent}")

    reports: list[Report] = []
    for name in given.questions:
        question = importlib.import_module(f"benchmarks.{name}")
        with own_folders() as folder:
            report = question.measure(engine=given.engine, rounds=given.rounds, folder=folder)
        print(report, end="\n\n", flush=True)
        reports.append(report)
        if given.json:
            content = {**circumstances(), "reports": [report.to_json() for report in reports]}
            given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
