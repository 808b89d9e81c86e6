"""bridge exports ls, show, verify, gc and rm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

import bridge
from bridge.cli import options
from bridge.cli.screen import print_table, shown_age
from bridge.display import format_bytes, format_count, plain_table

if TYPE_CHECKING:
    from bridge.tables.inventory import ExportInfo

# digests, and what another line says
_TOLD_ELSEWHERE = frozenset({"format", "num_rows", "route", "schema", "schema_digest", "session_time_zone"})

app = typer.Typer(no_args_is_help=True, help="Exports on a volume: what is there, and what may go.")


RootArgument = Annotated[
    str | None,
    typer.Argument(metavar="ROOT", help="Where exports went; else the setting volume, else the data folder."),
]
PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="The folder of one export, as ls shows it.")]
TableOption = Annotated[str | None, typer.Option("--table", metavar="T", help="Only exports of this table.")]


@app.command("ls")
def ls(root: RootArgument = None, table: TableOption = None, profile: options.Profile = None) -> None:
    """Show the exports in a folder, newest first, and what writers left."""
    exports = bridge.list_exports(_root(root, profile), table=table)
    complete = [info for info in exports if info.state == "complete"]
    others = [info for info in exports if info.state != "complete"]
    if complete:
        print_table(
            plain_table(
                ["table", "version", "rows", "shards", "size", "owner", "age", "in use", "what", "folder"],
                (
                    [
                        info.table, info.version, format_count(info.num_rows or 0), info.num_shards,
                        _size(info), info.receipt.get("user"), _age(info), _use(info), _what(info), info.path,
                    ]
                    for info in complete
                ),
            )
        )  # fmt: skip
        print()
    if others:
        rows = ([info.state, _size(info), _age(info), _use(info), info.problem, info.path] for info in others)
        print_table(plain_table(["not complete", "size", "age", "in use", "note", "folder"], rows))
        print()
    print(_amount(complete))


@app.command("show")
def show(path: PathArgument, profile: options.Profile = None) -> None:
    """Show what one export holds, what was asked for, and whether its files are there."""
    from bridge.tables.inventory import describe_export

    options.choose_profile(profile)
    info = describe_export(path)
    facts = {
        "state": info.state if info.problem is None else f"{info.state}: {info.problem}",
        "size": _size(info),
        "age": _age(info),
        "in use": _use(info),
    }
    if info.state == "complete":
        facts |= {"rows": format_count(info.num_rows or 0), "shards": f"{info.num_shards}, {_found(path)}"}
        facts["what"] = _what(info)
        for name, value in {**info.query, **info.receipt}.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key}: {item}" for key, item in value.items())
            elif isinstance(value, list):
                value = ", ".join(map(str, value))
            elif name.endswith("_bytes"):
                value = format_bytes(value)
            if value not in (None, "") and name not in _TOLD_ELSEWHERE:
                facts.setdefault(name, str(value))
    facts["folder"] = info.path
    print_table(plain_table(["fact", "value"], facts.items()))


@app.command("verify")
def verify(path: PathArgument, profile: options.Profile = None) -> None:
    """Read every byte of an export, and compare it with what was written. Exit status 1 where it is not whole."""
    options.choose_profile(profile)
    report = bridge.verify_export(path)
    unlisted = dict.fromkeys(report.unlisted, "is not listed: readers of the folder take its rows in")
    if not report.is_whole:
        print_table(plain_table(["file", "what is wrong"], {**report.damaged, **unlisted}.items()))
        print()
    seen = f"{len(report.damaged)} damaged, {len(report.unlisted)} not listed"
    verdict = "all as written" if report.is_whole else seen
    print(f"{report.num_shards} shards, {format_bytes(report.num_bytes)} in {report.path}: {verdict}")
    if not report.is_whole:
        raise typer.Exit(1)


@app.command("gc")
def gc(
    root: RootArgument = None,
    table: TableOption = None,
    keep_versions: Annotated[
        int | None,
        typer.Option("--keep-versions", metavar="N", min=1, help="Keep the newest N versions of each table and query."),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="AGE", help="Keep what is younger, such as 12h, 30d or 8w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    profile: options.Profile = None,
) -> None:
    """Delete old exports, and what killed writers left.

    An export goes where every rule that is given lets it go. The newest of each table and query stays, and so does what
    is in use. Exit status 1 where something could not be deleted.
    """
    max_age_s = None if max_age is None else options.seconds(max_age)
    report = bridge.prune_exports(
        _root(root, profile), table=table, keep_versions=keep_versions, max_age_s=max_age_s, dry_run=dry_run
    )
    verb = "would delete" if dry_run else "deleted"
    rows = [
        *([verb, _name(info), _size(info), _age(info), "", info.path] for info in report.deleted),
        *(["kept", _name(info), _size(info), _age(info), why, info.path] for info, why in report.kept),
        *(["FAILED", _name(info), _size(info), _age(info), why, info.path] for info, why in report.failed),
    ]
    if rows:
        print_table(plain_table(["", "export", "size", "age", "why", "folder"], rows))
        print()
    print(f"{verb} {_amount(report.deleted)}; kept {len(report.kept)}, failed {len(report.failed)}")
    if report.failed:
        raise typer.Exit(1)


@app.command("rm")
def rm(path: PathArgument, profile: options.Profile = None) -> None:
    """Delete one export that nobody uses."""
    options.choose_profile(profile)
    info = bridge.remove_export(path)
    print(f"deleted {_name(info)}, {_size(info)}: {info.path}")


def _root(root: str | None, profile: str | None) -> str:
    from bridge.config import data_folder, load_settings

    options.choose_profile(profile)
    if root is not None and not root.strip():
        raise typer.BadParameter("it is empty; give a folder, or leave it out.", param_hint="ROOT")
    return root or load_settings().volume or str(data_folder() / "exports")


def _found(path: str) -> str:
    report = bridge.verify_export(path, read=False)
    problems = [f"{name} {what}" for name, what in report.damaged.items()]
    return "; ".join(problems) if problems else "all there in full size"


def _amount(exports: Iterable[ExportInfo]) -> str:
    found = list(exports)
    size = format_bytes(sum(info.num_bytes or 0 for info in found))
    return f"{format_count(len(found))} export{'' if len(found) == 1 else 's'}, {size}"


def _name(info: ExportInfo) -> str:
    if info.table is None:
        return info.state
    return info.table if info.version is None else f"{info.table} version {info.version}"


def _size(info: ExportInfo) -> str:
    return "" if info.num_bytes is None else format_bytes(info.num_bytes)


def _what(info: ExportInfo) -> str:
    """Say what sets an export apart from all rows and columns of its table, as they come."""
    query = info.query
    parts = [] if info.problem is None else [f"DAMAGED: {info.problem}"]
    parts += [f"{name} {query[name]}" for name in ("where", "limit") if query.get(name) is not None]
    parts += [f"{name}({', '.join(query[name])})" for name in ("drop_nulls", "to_json") if query.get(name)]
    if query.get("order_by"):
        parts.append(f"sorted by {', '.join(query['order_by'])}")
    parts += ["mixed"] if "shuffle_at_write" in query else []
    parts += ["shared"] if query.get("user", "") is None else []
    num_columns = len(query.get("columns", ()))
    return "; ".join([f"{num_columns} column{'' if num_columns == 1 else 's'}", *parts])


def _age(info: ExportInfo) -> str:
    return shown_age(info.age_s) if info.age_s else ""


def _use(info: ExportInfo) -> str:
    return f"by {info.num_holders}" if info.num_holders else "no"
