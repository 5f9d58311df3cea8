"""Append-only, checksummed files for large rows.

Invariant: a place is handed to the ledger only after `sync`; a file is written by the one writer that created it and never
again after it was closed, so that a torn tail (of a crash, of a full disk) is bytes that no one refers to.

Records are gathered in a buffer and written past the page cache, where the file system can: rows are read once, much later, and
filling pages with them costs several times what the disk does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

from pipeline.durable import sync
from pipeline.errors import StoreCorrupt

_HEADER = struct.Struct("<4sQ32s")
_MAGIC = b"RSG1"
_BLOCK = 4096
"""Direct writes begin and end at multiples of it."""
_GATHERED = 4 * 1024 * 1024


class Segments:
    """One writer's segments. Not thread-safe: the writer thread owns it; reading needs only `read_record`."""

    def __init__(self, folder: Path, roll_bytes: int) -> None:
        self._folder = folder
        self._roll_bytes = roll_bytes
        self._file: int | None = None
        self._number = 0
        self._size = 0
        """With what is gathered."""
        self._synced = 0
        self._buffer = mmap.mmap(-1, _GATHERED)
        self._gathered = 0

    def append(self, data: bytes | memoryview, sha256: str) -> tuple[int, int]:
        """Take a record; returns (segment, offset). It is there, and durable, only after `sync`. Raises OSError."""
        if self._file is not None and self._size >= self._roll_bytes:
            self._roll()
        if self._file is None:
            self._create()
        offset = self._size
        try:
            self._gather(memoryview(_HEADER.pack(_MAGIC, len(data), bytes.fromhex(sha256))))
            self._gather(memoryview(data))
        except OSError:
            self._abandon()
            raise
        return self._number, offset

    def sync(self) -> None:
        if self._file is not None and self._size > self._synced:
            try:
                self._write()
                os.fdatasync(self._file)
            except OSError:
                self._abandon()
                raise
            self._synced = self._size

    def remove_unused(self, is_used: Callable[[int], bool]) -> int:
        """Delete whole segments that nothing refers to, except the open one; returns the bytes freed."""
        freed = 0
        for path in self._folder.glob("*.seg"):
            number = int(path.stem)
            if not (number == self._number and self._file is not None) and not is_used(number):
                freed += path.stat().st_size
                path.unlink()
        return freed

    def close(self) -> None:
        if self._file is not None:
            self._roll()

    def _gather(self, view: memoryview) -> None:
        while view:
            part = view[: _GATHERED - self._gathered]
            self._buffer[self._gathered : self._gathered + len(part)] = part
            self._gathered += len(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._gathered == _GATHERED:
                self._write()

    def _write(self) -> None:
        """What is gathered, filled up with zeros to a whole block."""
        assert self._file is not None
        start, padding = self._size - self._gathered, -self._gathered % _BLOCK
        end = self._gathered + padding
        self._buffer[self._gathered : end] = bytes(padding)
        with memoryview(self._buffer) as whole:
            _write_all(self._file, start, whole[:end])
        self._size, self._gathered = start + end, 0

    def _roll(self) -> None:
        self.sync()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _create(self) -> None:
        self._folder.mkdir(exist_ok=True)
        number = max((int(path.stem) for path in self._folder.glob("*.seg")), default=0)
        while self._file is None:  # another writer that lives on may take a number at the same time
            number += 1
            try:
                self._file = os.open(segment_path(self._folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue
        _past_the_page_cache(self._file)
        self._number, self._size, self._synced, self._gathered = number, 0, 0, 0
        sync(self._folder)

    def _abandon(self) -> None:
        """After a failed write or sync what follows the last sync cannot be trusted, and nobody refers to it: cut it off, and go on
        in a new file."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._synced)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
                raise
        finally:
            os.close(self._file)
            self._file = None


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.seg"


def read_record(folder: Path, number: int, offset: int, length: int, sha256: str) -> bytearray:
    """Raises StoreCorrupt when the bytes are not those that were written, FileNotFoundError when the segment is gone."""
    path = segment_path(folder, number)
    record = bytearray(_HEADER.size + length)
    file = os.open(path, os.O_RDONLY)
    try:
        got = _read_all(file, offset, memoryview(record))
    finally:
        os.close(file)
    if got != len(record):
        raise StoreCorrupt(f"{path} ends at byte {offset + got}, wanted {offset + len(record)}")
    magic, stored_length, stored_sha256 = _HEADER.unpack_from(record)
    data = record[_HEADER.size :]
    if magic != _MAGIC or stored_length != length or stored_sha256.hex() != sha256:
        raise StoreCorrupt(f"{path}: the record at byte {offset} is not the one that the ledger names")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreCorrupt(f"{path}: the record at byte {offset} has another checksum than was written")
    return data


def _past_the_page_cache(file: int) -> None:
    """Of a file system that keeps its files in memory, or knows no direct writes, nothing is asked."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _write_all(file: int, offset: int, view: memoryview) -> None:
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _read_all(file: int, offset: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
