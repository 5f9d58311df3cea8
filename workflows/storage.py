"""Where Ray Workflow keeps its checkpoints. Ray writes them in place; here a file appears whole or not at all.

Invariant: a file is written aside and renamed, and ends with a digest of what it holds; what a machine that died made of it is not
there. Nothing waits for the disk, three times a node: what was not yet on it is lost with the machine, but not with its processes.
The ledger knows what was done, and a node that runs again does only what is missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystemHandler, FileType, PyFileSystem

ASIDE = ".aside-"
DIGEST = 8
"""Bytes at the end of every file."""


def storage_uri(folder: Path) -> str:
    """The `storage=` argument of `ray.init` that keeps workflow checkpoints in `folder` (made with mode 0700: they are pickles)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return f"custom://workflows.storage.open_storage{quote(str(folder.resolve()))}"


def open_storage(path: str) -> tuple[PyFileSystem, str]:
    """Called by Ray in every process with the path of the URI; returns the file system and the prefix under it."""
    folder = Path(unquote(path))
    return PyFileSystem(AtomicFolder(folder.parent)), folder.name


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def _content(path: Path) -> bytes | None:
    """None: there is no such file, or it is torn."""
    if not path.is_file():
        return None
    whole = path.read_bytes()
    content = whole[:-DIGEST]
    return content if whole[-DIGEST:] == _digest(content) else None


class _Aside:
    """A file that takes its name when it is closed. pyarrow closes it exactly once when everything was written."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._aside = target.with_name(f"{ASIDE}{uuid.uuid4().hex}")
        self._file = open(self._aside, "wb")
        self._digest = hashlib.blake2b(digest_size=DIGEST)

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.write(self._digest.digest())
        self._file.close()
        os.replace(self._aside, self._target)


class AtomicFolder(FileSystemHandler):
    """A local folder as pyarrow sees a file system. Paths are relative to `root`, with or without a leading slash."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AtomicFolder) and other._root == self._root

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def _path(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def get_type_name(self) -> str:
        return "atomic-folder"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        base = self._path(selector.base_dir)
        if not base.is_dir():
            if selector.allow_not_found:
                return []
            raise FileNotFoundError(selector.base_dir)
        found = base.rglob("*") if selector.recursive else base.iterdir()
        names = sorted(entry.relative_to(self._root).as_posix() for entry in found if not entry.name.startswith(ASIDE))
        return [info for name in names if (info := self._info(name)).type != FileType.NotFound]

    def _info(self, path: str) -> FileInfo:
        where = self._path(path)
        if where.is_dir():
            return FileInfo(path, FileType.Directory)
        content = _content(where)
        if content is None:
            return FileInfo(path, FileType.NotFound)
        return FileInfo(path, FileType.File, size=len(content), mtime_ns=where.stat().st_mtime_ns)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._path(path).mkdir(parents=recursive, exist_ok=True, mode=0o700)

    def delete_dir(self, path: str) -> None:
        shutil.rmtree(self._path(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        folder = self._path(path)
        if missing_dir_ok and not folder.is_dir():
            return
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("the storage folder is never emptied as a whole")

    def delete_file(self, path: str) -> None:
        self._path(path).unlink()

    def move(self, source: str, target: str) -> None:
        os.replace(self._path(source), self._path(target))

    def copy_file(self, source: str, target: str) -> None:
        shutil.copyfile(self._path(source), self._path(target))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        content = _content(self._path(path))
        if content is None:
            raise FileNotFoundError(path)
        return pa.BufferReader(content)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self.open_input_stream(path)

    def open_output_stream(self, path: str, metadata: dict) -> pa.NativeFile:
        return pa.PythonFile(_Aside(self._path(path)), mode="w")

    def open_append_stream(self, path: str, metadata: dict) -> pa.NativeFile:
        raise NotImplementedError("workflow checkpoints are written whole")
