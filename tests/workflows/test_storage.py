"""Checkpoints of a workflow appear whole or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.fs as pafs
import pytest

from workflows.storage import open_storage, storage_uri

WRITER = """
import os, signal, sys
from workflows.storage import open_storage
system, prefix = open_storage(sys.argv[1])
with system.open_output_stream(f"{prefix}/output.pkl") as file:
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "work flow"
    storage_uri(folder)
    return folder


@pytest.fixture
def opened(folder):
    return open_storage(str(folder))


def read(opened, name: str) -> bytes:
    system, prefix = opened
    with system.open_input_stream(f"{prefix}/{name}") as file:
        return file.read()


def test_the_uri_names_the_module_and_the_folder_and_the_folder_is_private(tmp_path):
    folder = tmp_path / "a b%c"
    uri = storage_uri(folder)
    assert uri.startswith("custom://workflows.storage.open_storage/")
    assert folder.stat().st_mode & 0o777 == 0o700
    path = uri.removeprefix("custom://workflows.storage.open_storage")
    assert urlsplit(uri).scheme == "custom" and " " not in uri
    system, prefix = open_storage(path)
    with system.open_output_stream(f"{prefix}/x") as file:
        file.write(b"1")
    assert (folder / "x").read_bytes().startswith(b"1")


def test_a_file_takes_its_name_when_it_is_whole(folder, opened):
    system, prefix = opened
    with system.open_output_stream(f"{prefix}/output.pkl") as file:
        file.write(b"first")
    file = system.open_output_stream(f"{prefix}/output.pkl")
    file.write(b"second, ")
    file.write(b"in two parts")
    file.flush()
    assert read(opened, "output.pkl") == b"first"
    assert [info.base_name for info in system.get_file_info(pafs.FileSelector(prefix))] == ["output.pkl"]
    file.close()
    assert read(opened, "output.pkl") == b"second, in two parts"
    assert len(list(folder.iterdir())) == 1


def test_a_writer_that_is_killed_leaves_the_file_before(folder, opened):
    system, prefix = opened
    with system.open_output_stream(f"{prefix}/output.pkl") as file:
        file.write(b"whole")
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read(opened, "output.pkl") == b"whole"
    assert [info.base_name for info in system.get_file_info(pafs.FileSelector(prefix))] == ["output.pkl"]


TORN = {"empty": lambda whole: b"", "cut": lambda whole: whole[:7], "zeros": lambda whole: bytes(len(whole))}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_file_that_the_death_of_its_machine_tore_is_not_there(folder, opened, tear):
    system, prefix = opened
    for name in ("output.pkl", "args.pkl"):
        with system.open_output_stream(f"{prefix}/{name}") as file:
            file.write(b"a pickle")
    torn = folder / "output.pkl"
    torn.write_bytes(tear(torn.read_bytes()))
    assert system.get_file_info(f"{prefix}/output.pkl").type == pafs.FileType.NotFound
    assert [info.base_name for info in system.get_file_info(pafs.FileSelector(prefix))] == ["args.pkl"]
    with pytest.raises(FileNotFoundError):
        read(opened, "output.pkl")
    with system.open_output_stream(f"{prefix}/output.pkl") as file:
        file.write(b"again")
    assert read(opened, "output.pkl") == b"again"


def test_folders_and_files_are_found_moved_and_removed(folder, opened):
    system, prefix = opened
    system.create_dir(f"{prefix}/a/b", recursive=True)
    assert (folder / "a" / "b").stat().st_mode & 0o077 == 0
    with system.open_output_stream(f"/{prefix}/a/b/f") as file:  # Ray passes paths with and without the slash
        file.write(b"12345")
    kinds = {info.path: info.type for info in system.get_file_info(pafs.FileSelector(prefix, recursive=True))}
    assert kinds == {
        f"{prefix}/a": pafs.FileType.Directory,
        f"{prefix}/a/b": pafs.FileType.Directory,
        f"{prefix}/a/b/f": pafs.FileType.File,
    }
    assert system.get_file_info(f"{prefix}/a/b/f").size == 5
    assert system.get_file_info(f"{prefix}/none").type == pafs.FileType.NotFound
    system.move(f"{prefix}/a/b/f", f"{prefix}/a/g")
    system.copy_file(f"{prefix}/a/g", f"{prefix}/a/h")
    assert sorted(os.listdir(folder / "a")) == ["b", "g", "h"]
    system.delete_file(f"{prefix}/a/g")
    system.delete_dir_contents(f"{prefix}/a")
    assert os.listdir(folder / "a") == []
    system.delete_dir(f"{prefix}/a")
    assert os.listdir(folder) == []


def test_what_is_missing_is_said(opened):
    system, prefix = opened
    with pytest.raises(FileNotFoundError):
        system.get_file_info(pafs.FileSelector(f"{prefix}/none"))
    assert system.get_file_info(pafs.FileSelector(f"{prefix}/none", allow_not_found=True)) == []
    with pytest.raises(FileNotFoundError):
        system.open_input_stream(f"{prefix}/none")
    system.delete_dir_contents(f"{prefix}/none", missing_dir_ok=True)
