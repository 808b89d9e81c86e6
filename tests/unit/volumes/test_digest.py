from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import CorruptFileError
from bridge.volumes import digest
from bridge.volumes.digest import digest_bytes, digest_ranges, read_range


@given(st.binary(max_size=200), st.data())
def test_ranges_of_a_file_have_the_digest_of_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("d") / "file"
    path.write_bytes(content)
    bounds = st.tuples(st.integers(0, len(content)), st.integers(0, len(content))).map(sorted).map(tuple)
    ranges = data.draw(st.lists(bounds, max_size=4))

    assert digest_ranges(path, ranges) == [digest_bytes(content[start:stop]) for start, stop in ranges]


def test_a_range_larger_than_a_block_is_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_BLOCK", 7)
    (tmp_path / "file").write_bytes(bytes(range(100)))

    assert digest_ranges(tmp_path / "file", [(1, 99)]) == [digest_bytes(bytes(range(1, 99)))]


def test_the_digest_is_that_of_others() -> None:
    assert digest_bytes(b"bridge") == xxhash.xxh3_128(b"bridge").hexdigest()
    assert digest_bytes(memoryview(b"")) == "99aa06d3014798d86001c324468d497f"


def test_a_file_that_is_too_short_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    with pytest.raises(CorruptFileError, match=r"file ends at byte 10; bytes up to 12 were written\."):
        digest_ranges(path, [(8, 12)])

    file = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(CorruptFileError, match=r"file ends at byte 10; bytes up to 13 were written\."):
            read_range(file, path, 8, memoryview(bytearray(5)), "")
        with pytest.raises(CorruptFileError, match="file is damaged: bytes 2 to 5 differ from what was written"):
            read_range(file, path, 2, memoryview(bytearray(3)), digest_bytes(b"24"))
        target = bytearray(3)
        read_range(file, path, 2, memoryview(target), digest_bytes(b"234"))
        assert target == b"234"
    finally:
        os.close(file)
