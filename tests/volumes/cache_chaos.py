"""Kills processes that fetch through a file cache, and checks what they left.

As a program, it is the process to be killed: FOLDER VOLUME_FOLDER SEED.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bridge.volumes.cache import FileCache
from bridge.volumes.stores import LocalStorage

_MAX_BYTES = 12 << 20
_NUM_FILES = 40


def make_files(volume_folder: Path) -> dict[str, bytes]:
    """Return the files that `cache_round` fetches, by name; those not there are made. 20 MiB in all."""
    contents = {}
    for number in range(_NUM_FILES):
        name = f"class {number % 3}/{number}.bin"
        contents[name] = random.Random(number).randbytes(number * 26_000)
        path = volume_folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(contents[name])
    return contents


def cache_round(folder: Path, volume_folder: Path, seed: int) -> None:
    """Kill a process that fetches files of `volume_folder` with 8 threads, and check the cache in `folder`.

    Every copy that is handed out afterwards is the file, and what was left half done is deleted by the next who needs
    the room. Nobody else may use the cache meanwhile.
    """
    contents = make_files(volume_folder)
    command = [sys.executable, "-m", "tests.volumes.cache_chaos", str(folder), str(volume_folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"ready\n"
        time.sleep(random.Random(seed).uniform(0, 0.25))
        child.kill()
    storage, cache = LocalStorage(volume_folder), open_cache(folder)

    contents["whole.bin"] = bytes(1 << 20)  # from the round before
    for entry in cache.entries():
        assert entry.path.read_bytes() == contents[entry.source.removeprefix(f"{volume_folder}/")], entry
    with cache.epoch() as epoch:
        for name in random.Random(seed).sample(sorted(contents.keys() - {"whole.bin"}), 8):
            path = epoch.fetch(storage, name)
            assert path.is_relative_to(folder), path
            assert path.read_bytes() == contents[name], path
    # a file that needs all the room there is, and that no earlier round has left
    needed = volume_folder / "whole.bin"
    needed.unlink(missing_ok=True)
    needed.write_bytes(contents[needed.name])
    cache = FileCache(folder, max_bytes=1 << 20, min_free_bytes=0)
    with cache.epoch() as epoch:
        assert epoch.fetch(storage, needed.name).is_relative_to(folder)
        whole = {entry.path.parents[1] for entry in cache.entries()}
        assert set((folder / "files").iterdir()) == whole
        assert len(list((folder / "pins").iterdir())) == 1
    assert list((folder / "pins").iterdir()) == []


def open_cache(folder: Path) -> FileCache:
    return FileCache(folder, max_bytes=_MAX_BYTES, min_free_bytes=0)


def _fetch_for_ever(folder: Path, volume_folder: Path, seed: int) -> None:
    names = sorted(make_files(volume_folder))
    storage, cache = LocalStorage(volume_folder), open_cache(folder)
    sys.stdout.write("ready\n")
    sys.stdout.flush()

    def work(number: int) -> None:
        choice = random.Random(seed * 100 + number)
        while True:
            with cache.epoch() as epoch:
                for name in choice.sample(names, 2):
                    epoch.fetch(storage, name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _fetch_for_ever(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
