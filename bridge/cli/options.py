"""Arguments and options, each defined once for all the commands that take it: `options.Columns`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Source = Annotated[
    str,
    typer.Argument(metavar="TABLE", help="catalog.schema.table, schema.table, table, or the path of a Delta table."),
]
Columns = Annotated[str | None, typer.Option("--columns", metavar="A,B", help="The columns to read; else all.")]
Where = Annotated[str | None, typer.Option("--where", metavar="SQL", help="Read only the rows this is true for.")]
Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=0, help="A version of a Delta table; else the newest.")
]
Timestamp = Annotated[str | None, typer.Option("--timestamp", metavar="TIME", help="A time, instead of a version.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=0, help="At most so many rows.")]
Route = Annotated[
    Literal["auto", "collect", "export"], typer.Option("--route", help="How rows travel; auto decides by size.")
]
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", metavar="SIZE", help='The most that a collect may hold, such as "2GiB".')
]
VolumeOption = Annotated[
    str | None, typer.Option("--volume", metavar="FOLDER", help="Where an export goes: /Volumes/... or a folder.")
]
VolumeArgument = Annotated[
    str | None,
    typer.Argument(metavar="VOLUME", help="/Volumes/... or a folder; else the setting volume, else the data folder."),
]
ShardBytes = Annotated[str, typer.Option("--shard-bytes", metavar="SIZE", help="About how large a file is.")]
NumShards = Annotated[
    int | None, typer.Option("--num-shards", metavar="N", min=1, help="How many files, in place of their size.")
]
OrderBy = Annotated[str | None, typer.Option("--order-by", metavar="A,B", help="Sort all rows by these columns.")]
Shuffle = Annotated[int | None, typer.Option("--shuffle-at-write", metavar="SEED", min=0, help="Mix all rows once.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Write anew, whatever is there.")]
MaxAge = Annotated[
    str | None,
    typer.Option("--max-age", metavar="AGE", help='Take also an export so old, such as "6h", of what has no version.'),
]
Shared = Annotated[bool, typer.Option("--shared", help="Take, and give, exports of all users who say so.")]
Remote = Annotated[
    str | None, typer.Option("--remote", metavar="R", help="The engine: sail, local[*], sc://host:port, databricks.")
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="P", help="A file of settings: local, cluster, databricks, or your own."),
]
To = Annotated[Path, typer.Option("--to", metavar="PATH", help="A file that ends in .parquet, .arrow or .csv.")]


def choose_profile(profile: str | None) -> None:
    """Put a profile in force for every setting that this process reads, not for the remote alone."""
    if profile:
        os.environ["BRIDGE_PROFILE"] = profile


def seconds(text: str) -> float:
    """Return an age such as "30d" in seconds."""
    match = re.fullmatch(r"(\d+)\s*([smhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text} is no age; give a number and one of s, m, h, d, w, such as 30d.")
    return float(int(match[1]) * _UNITS[match[2]])
