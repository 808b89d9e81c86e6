"""A table of labels and a folder of images on a volume, trained on together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from tests.engines.conftest import EngineUnderTest
from tests.volumes.mount import Volume, mounted_volume

pytestmark = pytest.mark.fuse

COUNT = 40


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    """Let a mount that holds images stand for /Volumes."""
    backing = tmp_path / "backing"
    images = backing / "main/ml/images/day 1"
    images.mkdir(parents=True)
    for number in range(COUNT):
        (images / f"é{number}.bin").write_bytes(bytes([number]) * 100)
    with mounted_volume(tmp_path / "mount", backing=backing) as mounted:
        monkeypatch.setenv("BRIDGE_VOLUME_ROOT", str(mounted.path))
        monkeypatch.setenv("BRIDGE_CACHE_DIR", str(tmp_path / "cache"))
        yield mounted


def labels(sail: EngineUnderTest) -> str:
    path = "concat('/Volumes/main/ml/images/day 1/é', cast(id AS string), '.bin')"
    return sail.save(sail.spark.range(COUNT).selectExpr("id % 2 AS label", f"{path} AS image"))


def first_byte(path: str) -> int:
    return Path(path).read_bytes()[0]


def test_labels_and_images_train_together(sail: EngineUnderTest, volume: Volume, route: str, tmp_path: Path) -> None:
    table = sail.load(labels(sail), policies={"image": bridge.cached_file()}, route=route, volume=tmp_path / "exports")

    for _ in range(2):
        seen = []
        for batch in table.to_loader(batch_size=16, shuffle=True):
            assert all(path.startswith(str(tmp_path / "cache")) for path in batch["image"])
            pixels = torch.tensor([first_byte(path) for path in batch["image"]])
            assert torch.equal(pixels % 2, batch["label"])
            seen += pixels.tolist()
        assert sorted(seen) == list(range(COUNT))

    opened = {name: times for name, times in volume.opens().items() if name.endswith(".bin")}
    assert len(opened) == COUNT
    assert set(opened.values()) == {1}, "the second epoch reads the copies"


def test_every_hand_off_gives_local_paths(sail: EngineUnderTest, volume: Volume, route: str, tmp_path: Path) -> None:
    table = sail.load(labels(sail), policies={"image": bridge.cached_file()}, route=route, volume=tmp_path / "exports")

    handed: list[Any] = [
        table.to_arrow()["image"].to_pylist(),
        [path for batch in table.to_batches() for path in batch["image"].to_pylist()],
        table.to_pandas()["image"].tolist(),
        table.to_numpy()["image"].tolist(),
        table.to_torch()["image"],
        [row["image"] for row in table.to_huggingface(streaming=False)],
        [row["image"] for row in table.to_huggingface(streaming=True)],
    ]

    assert table.types[1].policies == "cached_file()"
    for paths in handed:
        assert sorted(map(first_byte, paths)) == list(range(COUNT))
        assert all(path.startswith(str(tmp_path / "cache")) for path in paths)


def test_a_null_stays_one_and_a_missing_file_is_named(sail: EngineUnderTest, volume: Volume) -> None:
    frame = sail.spark.sql("SELECT CAST(NULL AS STRING) AS image UNION ALL SELECT '/Volumes/main/ml/images/no.bin'")
    table = sail.load(frame, policies={"image": bridge.cached_file()})

    with pytest.raises(FileNotFoundError, match=r"/images/no\.bin"):
        table.to_torch()
    there = sail.load(frame.where("image IS NULL"), policies={"image": bridge.cached_file()})
    assert there.to_torch()["image"] == [None]
