from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import bridge
import bridge.volumes.path
from bridge.config import data_folder
from bridge.errors import VolumeError
from bridge.volumes.path import Place, is_local, is_path, locate, refuse_glob


@pytest.mark.parametrize(
    "path",
    [
        "/Volumes/main/ml/exports/day/1",
        "dbfs:/Volumes/main/ml/exports/day/1",
        "/Volumes//main/ml/exports/day/1/",
        "/Volumes/main/./ml/exports/day/1",
        Path("/Volumes/main/ml/exports/day/1"),
    ],
)
def test_a_volume_without_a_mount_is_under_the_root(tmp_path: Path, path: str | Path) -> None:
    place = locate(path, tmp_path)

    assert place == Place("/Volumes/main/ml/exports/day/1", tmp_path / "main/ml/exports/day/1")
    assert place.spark == f"file:{tmp_path}/main/ml/exports/day/1"
    assert place.folder() == place.local
    assert not list(tmp_path.iterdir())


def test_the_root_is_in_the_data_folder_unless_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("/Volumes/a/b/c").local == data_folder() / "volumes/a/b/c"
    assert bridge.volume_path("/Volumes/a/b/c") == str(data_folder() / "volumes/a/b/c")

    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(tmp_path))

    assert bridge.volume_path("/Volumes/a/b/c/x.pt") == f"{tmp_path}/a/b/c/x.pt"
    assert bridge.volume_path("dbfs:/Volumes/a/b/c/x.pt") == f"{tmp_path}/a/b/c/x.pt"


def test_a_mounted_volume_is_opened_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing can be mounted at /Volumes for one test alone.
    monkeypatch.setattr(bridge.volumes.path, "is_mounted", lambda name: name.startswith("/Volumes/main/ml/exports"))

    mounted = locate("dbfs:/Volumes/main/ml/exports/x", tmp_path)

    assert mounted.local == Path("/Volumes/main/ml/exports/x")
    assert mounted.spark == "/Volumes/main/ml/exports/x"
    assert (mounted / "y").spark == "/Volumes/main/ml/exports/x/y"
    assert locate("/Volumes/main/ml/other", tmp_path).local == tmp_path / "main/ml/other"


def test_a_volume_that_is_not_there_beside_others_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing can be mounted at /Volumes for one test alone.
    monkeypatch.setattr(bridge.volumes.path, "_is_there", lambda folder: str(folder) == "/Volumes/main")

    with pytest.raises(VolumeError, match=r"there is no volume main\.ml\.typo, or you may not use it\.\n  Correct the"):
        locate("/Volumes/main/ml/typo/x")
    assert locate("/Volumes/main/ml/typo/x", tmp_path).local == tmp_path / "main/ml/typo/x"
    assert locate("/Volumes/other/ml/exports").is_stand_in


def test_a_mount_that_is_broken_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path) -> os.stat_result:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(Path, "stat", broken)

    assert locate("/Volumes/a/b/c/x", tmp_path).local == Path("/Volumes/a/b/c/x")


@pytest.mark.parametrize(
    "path",
    [
        "/Volumes",
        "/Volumes/",
        "/Volumes/main",
        "/Volumes/main/ml",
        "/Volumes/main/ml/",
        "/Volumes/main/./ml",
        "dbfs:/Volumes/main/ml",
    ],
)
def test_a_volume_has_three_names(path: str) -> None:
    with pytest.raises(VolumeError, match=r"does not name a volume.\n  Give catalog, schema and volume: /Volumes/<cat"):
        locate(path)
    with pytest.raises(OSError, match="does not name a volume"):
        bridge.volume_path(path)


def test_a_volume_has_no_way_out() -> None:
    with pytest.raises(
        VolumeError, match=r'holds "\.\.", which a path of a volume may not\.\n  Give the path it leads'
    ):
        locate("/Volumes/main/ml/exports/../../other/x")


def test_other_paths_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    assert locate("/data/x") == Place("/data/x", Path("/data/x"))
    assert locate("/Volumeship/x").local == Path("/Volumeship/x")
    assert locate("a/b").local == tmp_path / "a/b"
    assert locate("a/b").spark == f"file:{tmp_path}/a/b"
    assert locate("~/x").local == Path("/home/someone/x")
    assert locate("~nobody-of-that-name/x").local == tmp_path / "~nobody-of-that-name/x"
    assert bridge.volume_path("a/b") == str(tmp_path / "a/b")


@pytest.mark.parametrize("url", ["file:/data/x", "file:///data/x", "file://data/x", "FILE:/data/x", "local:///data/x"])
def test_a_file_address_is_a_path(url: str) -> None:
    assert locate(url).local == Path("/data/x")
    assert locate(url).spark == "file:/data/x"


@pytest.mark.parametrize("url", ["s3://bucket/x", "abfss://c@a.dfs.core.windows.net/x", "gs://b/x", "dbfs:/tmp/x"])
def test_an_address_of_an_object_store_has_no_folder(url: str) -> None:
    place = locate(url)

    assert place.local is None
    assert place.spark == url
    assert (place / "y").name == f"{url}/y"
    assert (place / "y").local is None
    with pytest.raises(VolumeError, match=r"is not a folder that Python can open here.\n  Give a volume"):
        place.folder()
    with pytest.raises(VolumeError, match="is not a folder that Python can open here"):
        bridge.volume_path(url)


@pytest.mark.parametrize("character", "?*[]{}")
def test_roots_that_readers_would_expand_are_refused(tmp_path: Path, character: str) -> None:
    with pytest.raises(VolumeError, match=r"cannot hold exports: readers expand \? \* \[ \] \{ \} in a path"):
        refuse_glob(locate(tmp_path / f"a{character}b"))
    refuse_glob(locate(tmp_path / "a b%é"))


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("t", False),
        ("a.b.c", False),
        ("`a/b`.c", False),
        ("/data/t", True),
        ("./t", True),
        ("t/", True),
        ("~", True),
        ("s3://b/t", True),
        ("file:/t", True),
    ],
)
def test_a_path_has_a_slash(text: str, is_one: bool) -> None:
    assert is_path(text) is is_one


def test_what_is_like_a_path_is_taken(tmp_path: Path) -> None:
    class Like(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path)

    assert locate(Like()).local == tmp_path


def test_a_folder_on_a_disk_is_local_and_what_is_not_known_is_not(tmp_path: Path) -> None:
    assert is_local(tmp_path)
    assert is_local(tmp_path / "not" / "there")
    assert not is_local(Path("/proc"))
