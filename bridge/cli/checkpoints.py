"""bridge checkpoints ls, show, verify, convert and gc."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.cli import options
from bridge.cli.screen import print_table, shown_age
from bridge.display import format_bytes, format_count, plain_table

if TYPE_CHECKING:
    from bridge.checkpoints.inventory import CheckpointInfo

_MOST_SHOWN = 40  # of a value

app = typer.Typer(no_args_is_help=True, help="Checkpoints: what is there, and what may go.")

RootArgument = Annotated[str, typer.Argument(metavar="ROOT", help="The folder that was saved to.")]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="That folder, or one checkpoint in it, as ls shows.")]


@app.command("ls")
def ls(root: RootArgument, profile: options.Profile = None) -> None:
    """Show the checkpoints in a folder, newest first, and what writers left."""
    from bridge.checkpoints.inventory import list_checkpoints

    options.choose_profile(profile)
    found = list_checkpoints(root)
    rows = (
        [
            _state(info),
            info.step, _size(info), info.world_size, shown_age(info.age_s), _facts(info), info.path,
        ]
        for info in found
    )  # fmt: skip
    print_table(plain_table(["state", "step", "size", "ranks", "age", "noted", "folder"], rows))
    whole = sum(info.state == "complete" and info.problem is None for info in found)
    print(f"\n{whole} of {len(found)} complete")


@app.command("show")
def show(path: PathArgument, profile: options.Profile = None) -> None:
    """Show every entry of one checkpoint, the newest where a folder holds several."""
    from bridge.checkpoints.opened import open_checkpoint
    from bridge.errors import CheckpointError

    options.choose_profile(profile)
    opened = open_checkpoint(path)
    if opened.index is None:
        raise CheckpointError(
            f"{path} was written by torch's FileSystemWriter.\n  bridge checkpoints convert writes it in this form."
        )
    index = opened.index
    rows: list[Sequence[object]] = [
        *(
            [
                name, str(stored.dtype).removeprefix("torch."), " x ".join(map(str, stored.shape)), len(stored.parts),
                format_bytes(sum(part.stop - part.start for part in stored.parts)),
            ]
            for name, stored in index.tensors.items()
        ),
        *[[name, "value", _shortened(value), "", ""] for name, value in index.values.items()],
        *([name, "pickled", "", 1, format_bytes(part.stop - part.start)] for name, part in index.pickles.items()),
    ]  # fmt: skip
    print_table(plain_table(["entry", "type", "shape or value", "parts", "size"], rows))
    print(
        f"\n{format_count(len(rows))} entries, {format_bytes(index.num_bytes)} in {len(index.files)} files: "
        f"{opened.address}"
    )


@app.command("verify")
def verify(path: PathArgument, profile: options.Profile = None) -> None:
    """Read every byte of a checkpoint, and compare it with what was written. Exit status 1 where it is not whole."""
    from bridge.checkpoints.inventory import verify_checkpoint

    options.choose_profile(profile)
    damaged = verify_checkpoint(path)
    if not damaged:
        print(f"{path}: all as written")
        return
    rows = ([name, told.partition("\n")[0]] for name, told in damaged.items())
    print_table(plain_table(["file", "what is wrong"], rows))
    raise typer.Exit(1)


@app.command("convert")
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, or a .pt or .pth file of torch.save.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder, or a new .pt, .pth or .safetensors file.")],
    profile: options.Profile = None,
) -> None:
    """Write a checkpoint in another form: ours, torch.save's, or safetensors, which holds tensors alone."""
    from bridge.checkpoints.inventory import convert_checkpoint

    options.choose_profile(profile)
    print(f"{convert_checkpoint(source, target)} entries written to {target}")


@app.command("gc")
def gc(
    root: RootArgument,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the last N steps of a run; else all.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", min=1, help="Keep steps that are a multiple of N too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    profile: options.Profile = None,
) -> None:
    """Delete what killed writers left more than an hour ago, and old steps. Exit status 1 where something stays."""
    from bridge.checkpoints.inventory import prune_checkpoints

    options.choose_profile(profile)
    doomed, problems = prune_checkpoints(root, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    if doomed:
        rows = ([verb, one.step, format_bytes(one.num_bytes), one.attempt.name] for one in doomed)
        print_table(plain_table(["", "step", "size", "folder"], rows))
        print()
    print(f"{verb} {len(doomed)} checkpoints, {format_bytes(sum(one.num_bytes for one in doomed))}")
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems:
        raise typer.Exit(1)


def _state(info: CheckpointInfo) -> str:
    if info.problem is None:
        return info.state
    return f"{'DAMAGED' if info.state == 'complete' else info.state}: {info.problem}"


def _size(info: CheckpointInfo) -> str:
    return "" if info.num_bytes is None else format_bytes(info.num_bytes)


def _facts(info: CheckpointInfo) -> str:
    metrics = info.facts.get("metrics", {})
    others = {name: value for name, value in info.facts.items() if name not in ("step", "metrics")}
    shown = {
        name: f"{value:.6g}" if isinstance(value, float) else value for name, value in {**metrics, **others}.items()
    }
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _shortened(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
