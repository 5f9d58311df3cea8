"""Large rows in files: torn tails, checksums, rotation, and what a full disk leaves behind."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest

from pipeline.buffer import segments
from pipeline.buffer.segments import Segments, read_record, segment_path
from pipeline.errors import StoreCorrupt


def put(store: Segments, data: bytes):
    place = take(store, data)
    store.sync()
    return place


def take(store: Segments, data: bytes):
    sha256 = hashlib.sha256(data).hexdigest()
    number, offset = store.append(data, sha256)
    return number, offset, len(data), sha256


def test_records_are_read_back_across_rotation(tmp_path):
    store = Segments(tmp_path, roll_bytes=1000)
    data = [bytes([i]) * 400 for i in range(10)]
    places = [take(store, item) for item in data]
    store.sync()
    assert [bytes(read_record(tmp_path, *place)) for place in places] == data
    assert len(list(tmp_path.glob("*.seg"))) > 2


def test_a_torn_tail_hurts_only_itself_and_no_writer_appends_to_it(tmp_path):
    store = Segments(tmp_path, 1 << 20)
    whole, torn = take(store, b"a" * 500), take(store, b"b" * 500)
    store.close()
    os.truncate(segment_path(tmp_path, torn[0]), torn[1] + 300)
    later = put(Segments(tmp_path, 1 << 20), b"c" * 500)
    assert later[0] != torn[0]
    assert bytes(read_record(tmp_path, *whole)) == b"a" * 500
    assert bytes(read_record(tmp_path, *later)) == b"c" * 500
    with pytest.raises(StoreCorrupt, match="ends at byte"):
        read_record(tmp_path, *torn)


@pytest.mark.parametrize("where", [0, 20, 60])
def test_a_flipped_byte_is_noticed(tmp_path, where):
    store = Segments(tmp_path, 1 << 20)
    place = put(store, b"a" * 500)
    store.close()
    path = segment_path(tmp_path, place[0])
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=r"000001\.seg"):
        read_record(tmp_path, *place)


def test_two_writers_never_share_a_file(tmp_path):
    first, second = Segments(tmp_path, 1 << 20), Segments(tmp_path, 1 << 20)
    places = [put(store, bytes([i]) * 100) for i, store in enumerate([first, second, first, second])]
    assert places[0][0] != places[1][0]
    assert [bytes(read_record(tmp_path, *place)) for place in places] == [bytes([i]) * 100 for i in range(4)]


def test_after_a_full_disk_what_was_synced_stands_and_later_records_are_written(tmp_path, monkeypatch):
    store = Segments(tmp_path, 1 << 20)
    before = put(store, b"a" * 500)
    size = segment_path(tmp_path, before[0]).stat().st_size
    real, calls = os.pwrite, []

    def full(file, data, offset):
        calls.append(offset)
        if len(calls) == 1:
            return real(file, data[:4096], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        put(store, b"b" * 5000)
    monkeypatch.undo()
    after = put(store, b"c" * 500)
    assert bytes(read_record(tmp_path, *before)) == b"a" * 500
    assert bytes(read_record(tmp_path, *after)) == b"c" * 500
    assert segment_path(tmp_path, before[0]).stat().st_size == size, "the torn record is cut off"
    assert after[0] != before[0]


def test_records_larger_than_what_is_gathered_and_many_of_one_sync(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_GATHERED", 8192)
    store = Segments(tmp_path, 1 << 20)
    data = [os.urandom(size) for size in (8192 - 44, 1, 30_000, 4096, 0, 8192)]
    places = [take(store, item) for item in data]
    store.sync()
    places.append(put(store, b"later"))
    assert [bytes(read_record(tmp_path, *place)) for place in places] == [*data, b"later"]


def test_unused_segments_are_deleted_whole_but_never_the_open_one(tmp_path):
    store = Segments(tmp_path, roll_bytes=100)
    places = [put(store, bytes([i]) * 200) for i in range(4)]
    size = segment_path(tmp_path, places[0][0]).stat().st_size
    assert store.remove_unused(lambda number: number == places[1][0]) == 2 * size > 0
    assert {int(path.stem) for path in tmp_path.glob("*.seg")} == {places[1][0], places[3][0]}
