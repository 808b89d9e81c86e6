"""What runs code when it is unpickled, as somebody may write it who means harm."""

from __future__ import annotations

from typing import Any

RAN: list[str] = []


def run(what: str) -> None:
    RAN.append(what)


class Harmful:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return run, ("code of the file",)
