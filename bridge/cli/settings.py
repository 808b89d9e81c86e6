"""bridge config."""

from __future__ import annotations

from pathlib import Path

from bridge.cli import options
from bridge.cli.screen import print_table
from bridge.display import format_bytes, plain_table


def config(profile: options.Profile = None) -> None:
    """Show the settings in force, and where each came from.

    Secrets are hidden.
    """
    from bridge.config import load_settings, profiles

    settings = load_settings(profile=profile)
    rows = [[name, _shown(name, getattr(settings, name)), origin] for name, origin in settings.origins.items()]
    print_table(plain_table(["setting", "value", "from"], rows))
    print()
    print_table(plain_table(["profile", "file"], [[name, str(path)] for name, path in profiles().items()]))


def _shown(name: str, value: object) -> str:
    from bridge.config import redact

    if value is None:
        return "(decided when needed)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    return str(value) if isinstance(value, Path) else redact(str(value))
