"""A mounted folder that refuses, lags and fails as Unity Catalog volumes are reported to.

    with mounted_volume(tmp_path, open_us=20_000, listing_lag_ms=500) as volume:
        (volume.path / "a.bin").write_bytes(b"...")
        volume.fault("eio_read", times=2, match="a.bin")

Needs /dev/fuse, gcc and libfuse3 with its headers, as the marker `fuse` says. Works as root and as an ordinary user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict, Unpack

_COMPILER = ("gcc", "-O2", "-Wall", "-Wextra", "-Werror")
_LIBRARIES = ("-lfuse3", "-lpthread")
_PATIENCE_S = 20.0

Fault = Literal["eio_open", "eio_read", "eio_write", "eio_stat", "eio_list", "eio_close", "eio_delete"]


class Settings(TypedDict, total=False):
    """What can be set at the start and at any time later; zero where nothing else is said."""

    open_us: int
    """Microseconds that an open or a creation takes."""
    stat_us: int
    """Microseconds that a stat takes, and each lookup of a name that the kernel does not remember."""
    list_us: int
    """Microseconds that a listing of one folder takes, however long it is."""
    bytes_per_s: int
    """What one open file reads or writes in a second; 0 is as fast as it goes."""
    cache_ms: int
    """How long the kernel remembers names and what stat said of them. The default of 1000 is what libfuse gives a mount
    that asks for nothing, which is right for measuring. It hides latencies, faults and changes behind the mount from
    those who ask again within it, so tests want 0: then each call costs a lookup for each name in its path."""
    listing_lag_ms: int
    """How long listings lack a new file after it was closed, or a new folder after it was made."""
    lookup_lag_ms: int
    """How long a new file is not found by its name either, nor while it is written. Folders are found at once."""
    capacity_bytes: int
    """Bytes that can be stored through the mount until deletion gives room back; 0 is no limit."""
    free_bytes: int
    """Free bytes that statfs tells of, whatever is true; -1, the default, is the truth."""
    refuse_times: bool
    """Whether utime fails with ENOSYS, which is the default. Changes of mode and owner are accepted without effect."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the kernel has asked of a volume, refused and failed requests included."""

    opens: int
    """Of existing files."""
    creates: int
    stats: int
    """Lookups of a name included, and so one for each open of a path that the kernel does not remember."""
    listings: int
    reads: int
    bytes_read: int
    """What the kernel read ahead included."""
    writes: int
    bytes_written: int
    deletes: int
    stored: int
    """Bytes written through the mount and not deleted or overwritten since."""


class Volume:
    """A mounted volume, made by `mounted_volume`. May be used by several threads, but by one process alone."""

    def __init__(self, path: Path, backing: Path, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.path = path
        """Where it is mounted."""
        self.backing = backing
        """Where its files lie, without latencies and refusals. What is put there takes none of the capacity."""
        self._process = process
        self._control = control
        self._replies = control.makefile("rb")
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process that serves the files."""
        return self._process.pid

    def set(self, **settings: Unpack[Settings]) -> None:
        """Change settings; the next request sees the change, save for names that the kernel still remembers."""
        for name, value in settings.items():
            self._tell(f"set {name} {value:d}")

    def fault(self, kind: Fault, *, times: int | None = None, match: str | bytes = b"") -> None:
        """Let requests fail with EIO.

        Lookups count as stats, so `eio_stat` without `match` also strikes the folders on the way. A file opened after
        `eio_read` was set for it bypasses the page cache, so that each failure reaches a caller and none is lost to
        read-ahead; it cannot be mapped shared.

        Args:
            kind: What fails. `eio_close` fails the close of a file open for writing, whose bytes are there all the
                same.
            times: How often, and then no more; None is forever.
            match: A part of the path from the root of the volume; empty is every path.
        """
        self._add_fault(kind, times, match)

    def slow(
        self, *, bytes_per_s: int = 0, latency_us: int = 0, times: int | None = None, match: str | bytes = b""
    ) -> None:
        """Let the reads of some files be slow.

        Args:
            bytes_per_s: In place of the volume's own, for each open file; 0 leaves that.
            latency_us: Of each read that reaches the volume: 128 KiB, where the kernel reads ahead.
            times: Of how many reads; None is all.
            match: A part of the path from the root of the volume; empty is every path.
        """
        self._add_fault("slow", times, match, bytes_per_s, latency_us)

    def clear_faults(self) -> None:
        """End all faults and slowness."""
        self._tell("clear")

    def counts(self) -> Counts:
        """Return what was asked since the start."""
        pairs = (pair.split("=") for pair in self._tell("counts"))
        return Counts(**{name: int(value) for name, value in pairs})

    def opens(self) -> Counter[str]:
        """Return how often each file was opened for reading, by its path from the root of the volume.

        Only opens that succeeded count. Names are decoded as by os.fsdecode.
        """
        opens: Counter[str] = Counter()
        for pair in self._tell("opens"):
            times, _, name = pair.partition(":")
            opens[os.fsdecode(bytes.fromhex(name))] += int(times)
        return opens

    def _add_fault(
        self, kind: str, times: int | None, match: str | bytes, bytes_per_s: int = 0, latency_us: int = 0
    ) -> None:
        forever = -1
        part = os.fsencode(match).hex()
        self._tell(f"fault {kind} {forever if times is None else times} {bytes_per_s} {latency_us} {part}")

    def _tell(self, command: str) -> list[str]:
        with self._lock:
            try:
                self._control.sendall(command.encode() + b"\n")
                answer = self._replies.readline().decode()
            except ConnectionError:
                answer = ""
        if not answer:
            raise ConnectionError(f"{self.path} is no longer served")
        state, *words = answer.split()
        if state != "ok":
            raise ValueError(f"{command!r} is refused: {' '.join(words)}")
        return words

    def _close(self) -> None:
        """Let the server unmount and end, as it does when this process dies."""
        with contextlib.suppress(OSError):  # the server may have ended before
            self._control.shutdown(socket.SHUT_RDWR)  # which also counts where a forked process holds a copy
        self._replies.close()
        self._control.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if is_mounted(self.path):  # the server was killed, and left a mount that answers nothing
            subprocess.run(["fusermount3", "-uz", self.path], check=True)
        self.path.rmdir()


@contextlib.contextmanager
def mounted_volume(
    folder: Path, *, backing: Path | None = None, threads: int = 512, **settings: Unpack[Settings]
) -> Iterator[Volume]:
    """Mount a volume at `folder`/volume until the end of the block, or of this process.

    Args:
        folder: Made if it is not there.
        backing: Holds the files of the volume; `folder`/backing if None, made if it is not there.
        threads: How many requests are served, and slept on, at once.
        settings: See `Settings`.
    """
    server = build_server()
    path = folder.absolute() / "volume"
    backing = (backing or folder / "backing").absolute()
    path.mkdir(parents=True)
    backing.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [server, backing, path, str(os.getpid()), str(threads)],
            stdin=theirs,
            stdout=theirs,
            start_new_session=True,  # an interrupt at the terminal is for the owner, which then unmounts
        )
    ours.settimeout(_PATIENCE_S)
    volume = Volume(path, backing, process, ours)
    try:
        if not volume._replies.readline():
            raise OSError(f"{path} could not be mounted; the reason is on standard error")
        volume.set(**settings)
        yield volume
    finally:
        volume._close()


def build_server() -> Path:
    """Compile the file system, once for each user and version of it, and return the program."""
    source = Path(__file__).with_name("volume.c")
    digest = hashlib.sha256(source.read_bytes() + repr((_COMPILER, _LIBRARIES)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"bridge-volume-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it, or set TMPDIR")
    program = folder / "volume"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            built = Path(partial) / "volume"
            subprocess.run([*_COMPILER, source, "-o", built, *_LIBRARIES], check=True)
            built.replace(program)
    return program


def is_mounted(path: Path) -> bool:
    """Return whether something is mounted at `path`, also if it no longer answers."""
    escaped = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(path))
    mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return any(mount.split(b" ")[4] == escaped for mount in mounts)
