"""bridge cp."""

from __future__ import annotations

from typing import Annotated

import typer

import bridge


def cp(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder or a file: a path, /Volumes/..., or an address.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="The folder that is to hold what SOURCE holds, or where a single file is to go."
        ),
    ],
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="At most so many; else up to 128 as needed.")
    ] = None,
) -> None:
    """Copy a folder or a file. What differs in size or time is replaced, the rest skipped: run it again to go on."""
    _tell_stand_ins(source, target)
    try:
        print(bridge.copy_tree(source, target, num_threads=threads))
    except FileNotFoundError as exc:
        raise typer.BadParameter(str(exc), param_hint="SOURCE") from exc
    except KeyboardInterrupt:
        typer.echo("Interrupted. What was copied is whole; run it again for the rest.", err=True)
        raise typer.Exit(130) from None


def _tell_stand_ins(*paths: str) -> None:
    from bridge.volumes.stores import open_storage

    for path in paths:
        folder = open_storage(path).folder
        if path.removeprefix("dbfs:").startswith("/Volumes/") and not str(folder or "/Volumes/").startswith(
            "/Volumes/"
        ):
            typer.echo(f"{path} is not mounted here; {folder} stands for it.", err=True)
