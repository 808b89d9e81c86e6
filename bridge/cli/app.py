"""The command `bridge`: its subcommands, and how errors leave it.

Nothing heavy is imported here or at the top of a command's module, so that `bridge --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import bridge
from bridge.cli import cache, checkpoints, demo, doctor, exports, files, settings, tables
from bridge.errors import BridgeError


class _Commands(TyperGroup):
    """Shows what `bridge` raises on purpose as one message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BridgeError as exc:
            if ctx.params["debug"]:
                raise
            typer.echo(f"{type(exc).__name__}: {exc}", err=True)
            raise typer.Exit(1) from exc
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"bridge {bridge.__version__}")
        raise typer.Exit


@app.callback(help=bridge.__doc__)
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(tables.plan)
app.command("load")(tables.load)
app.command("export")(tables.export)
app.add_typer(exports.app, name="exports")
app.add_typer(checkpoints.app, name="checkpoints")
app.command("cp")(files.cp)
app.command("config")(settings.config)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="bridge")


if __name__ == "__main__":
    main()
