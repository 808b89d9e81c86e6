"""bridge cp."""

from __future__ import annotations

from typing import Annotated

import typer

import bridge


def cp(
    source: Annotated[str, typer.Argument(help="A folder or a file: a path, /Volumes/..., or an address.")],
    target: Annotated[str, typer.Argument(help="What is to hold it; made with the folders above it.")],
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="At most so many; else as it takes.")
    ] = None,
) -> None:
    """Copy a folder or a file. What is there is skipped, so that one that was cut off is run again."""
    try:
        print(bridge.copy_tree(source, target, num_threads=threads))
    except FileNotFoundError as exc:
        raise typer.BadParameter(str(exc), param_hint="SOURCE") from exc
