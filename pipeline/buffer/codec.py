"""Groups, samples and columns as compact bytes, and back.

Invariant: decode(encode(x)) equals x bit by bit, NaN included. The form is a msgpack header (scalars, task, lengths) and one raw
little-endian block per array, concatenated over the samples; it holds no pickled object, so that reading it runs no code.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from pipeline.errors import DataError, StoreCorrupt
from pipeline.records import Column, Group, Sample, Sampling, Stopping, Task

ARRAYS: tuple[tuple[str, np.dtype], ...] = (
    ("token_ids", np.dtype("<i4")),
    ("logprobs", np.dtype("<f4")),
    ("versions", np.dtype("<i4")),
    ("loss_mask", np.dtype("<u1")),
    ("executor", np.dtype("<u1")),
)
"""Per-token arrays of a sample, wide ones first so that every block starts aligned."""

_SCALARS = tuple(f.name for f in fields(Sample) if f.name not in dict(ARRAYS))
_PREFIX = struct.Struct("<4sI")
_MAGIC = b"RPB1"
_ALIGN = 16
_WIDE_INT = 1

Buffer = bytes | bytearray


def digest(data: Buffer) -> str:
    """sha256 of encoded bytes, in hex: what the ledger shows as `rows_sha256`."""
    return hashlib.sha256(data).hexdigest()


def encode_group(group: Group) -> bytes:
    """Rows of a group, without its columns. Raises DataError for an array of another type or length than `Sample` says."""
    head = {
        "kind": "group",
        "ordinal": group.ordinal,
        "step": group.step,
        "attempt": group.attempt,
        "weight_version": group.weight_version,
        "task": _fields(group.task) | {"sampling": _fields(group.task.sampling), "stopping": _fields(group.task.stopping)},
        "samples": [_scalars(sample) for sample in group.samples],
        "lengths": [len(sample.token_ids) for sample in group.samples],
    }
    return _join(head, _sample_blocks(group.samples))


def decode_group(data: Buffer) -> Group:
    head, body = _split(data, "group")
    return Group(
        ordinal=head["ordinal"],
        step=head["step"],
        attempt=head["attempt"],
        task=_task(head["task"]),
        weight_version=head["weight_version"],
        samples=_samples(head, body),
    )


def _fields(record: Any) -> dict[str, Any]:
    """Not `asdict`, which copies deep."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def encode_sample(sample: Sample) -> bytes:
    head = {"kind": "sample", "samples": [_scalars(sample)], "lengths": [len(sample.token_ids)]}
    return _join(head, _sample_blocks((sample,)))


def decode_sample(data: Buffer) -> Sample:
    return _samples(*_split(data, "sample"))[0]


def encode_column(column: Column) -> bytes:
    """One produced field. Arrays of one name share type and trailing shape over the samples; a sample may lack a name."""
    names = sorted({name for arrays in column.samples.values() for name in arrays})
    head = {
        "kind": "column",
        "name": column.name,
        "ordinal": column.ordinal,
        "producer": column.producer,
        "digest": column.digest,
        "sample_ids": list(column.samples),
        "arrays": [_array_head(column, name) for name in names],
    }
    blocks = (
        (_raw(arrays[name], arrays[name].dtype.newbyteorder("<")) for arrays in column.samples.values() if name in arrays)
        for name in names
    )
    return _join(head, blocks)


def decode_column(data: Buffer) -> Column:
    head, body = _split(data, "column")
    samples: dict[str, dict[str, np.ndarray]] = {sample_id: {} for sample_id in head["sample_ids"]}
    start = 0
    for array in head["arrays"]:
        dtype, tail = np.dtype(array["dtype"]), tuple(array["tail"])
        width = int(np.prod(tail, dtype=np.int64))
        total = sum(length for length in array["lengths"] if length is not None) * width
        block = _block(body, start, dtype, total)
        start = _aligned(start + total * dtype.itemsize)
        at = 0
        for sample_id, length in zip(samples, array["lengths"], strict=True):
            if length is not None:
                samples[sample_id][array["name"]] = block[at : at + length * width].reshape(length, *tail)
                at += length * width
    return Column(head["name"], head["ordinal"], head["producer"], head["digest"], samples)


def _array_head(column: Column, name: str) -> dict[str, Any]:
    arrays = [arrays.get(name) for arrays in column.samples.values()]
    kinds = {(array.dtype.newbyteorder("<").str, array.shape[1:]) for array in arrays if array is not None and array.ndim}
    if len(kinds) != 1 or any(array is not None and not array.ndim for array in arrays):
        raise DataError(f"column {column.name!r} of ordinal {column.ordinal}: array {name!r} has not one type and shape: {kinds}")
    dtype, tail = kinds.pop()
    if np.dtype(dtype).kind not in "iufb":
        raise DataError(f"column {column.name!r} of ordinal {column.ordinal}: array {name!r} has type {dtype}, wanted numbers")
    lengths = [None if array is None else len(array) for array in arrays]
    return {"name": name, "dtype": dtype, "tail": list(tail), "lengths": lengths}


def _scalars(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in _SCALARS}


def _sample_blocks(samples: tuple[Sample, ...]) -> Iterable[Iterable[np.ndarray]]:
    for sample in samples:
        for name, dtype in ARRAYS:
            array = getattr(sample, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (len(sample.token_ids),):
                got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise DataError(f"sample {sample.sample_id}: {name} is {got}, wanted {dtype.name} ({len(sample.token_ids)},)")
    return ((_raw(getattr(sample, name), dtype) for sample in samples) for name, dtype in ARRAYS)


def _samples(head: dict[str, Any], body: memoryview) -> tuple[Sample, ...]:
    lengths = head["lengths"]
    total, start = sum(lengths), 0
    blocks: dict[str, np.ndarray] = {}
    for name, dtype in ARRAYS:
        blocks[name] = _block(body, start, dtype, total)
        start = _aligned(start + total * dtype.itemsize)
    samples, at = [], 0
    for scalars, length in zip(head["samples"], lengths, strict=True):
        arrays = {name: block[at : at + length] for name, block in blocks.items()}
        scalars["turns"] = tuple(scalars["turns"])
        samples.append(Sample(**scalars, **arrays))
        at += length
    return tuple(samples)


def _task(head: dict[str, Any]) -> Task:
    head["messages"] = tuple((role, content) for role, content in head["messages"])
    head["needs"] = tuple(head["needs"])
    head["sampling"] = Sampling(**head["sampling"])
    head["stopping"] = Stopping(**head["stopping"])
    return Task(**head)


def _raw(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As it is joined: an array that is contiguous and of this type already is not copied."""
    return np.ascontiguousarray(array, dtype)


def _block(body: memoryview, start: int, dtype: np.dtype, count: int) -> np.ndarray:
    if start + count * dtype.itemsize > len(body):
        raise StoreCorrupt(f"stored rows end at byte {len(body)}, wanted {start + count * dtype.itemsize}")
    return np.frombuffer(body, dtype, count, start) if count else np.empty(0, dtype)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _join(head: dict[str, Any], blocks: Iterable[Iterable[np.ndarray]]) -> bytes:
    packed = _pack(head)
    start = _aligned(_PREFIX.size + len(packed))
    chunks: list[bytes | np.ndarray] = [
        _PREFIX.pack(_MAGIC, len(packed)),
        packed,
        bytes(start - _PREFIX.size - len(packed)),
    ]
    for block in blocks:
        parts = list(block)
        size = sum(part.nbytes for part in parts)
        chunks += parts
        chunks.append(bytes(_aligned(size) - size))
    return b"".join(chunks)


def _split(data: Buffer, kind: str) -> tuple[dict[str, Any], memoryview]:
    if len(data) < _PREFIX.size:
        raise StoreCorrupt(f"stored rows are {len(data)} bytes, shorter than their prefix")
    magic, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise StoreCorrupt(f"stored rows begin with {magic!r}, wanted {_MAGIC!r}")
    writable = memoryview(data if isinstance(data, bytearray) else bytearray(data))
    head = msgpack.unpackb(
        writable[_PREFIX.size : _PREFIX.size + length],
        strict_map_key=False,
        unicode_errors="surrogatepass",
        ext_hook=_unpack_extension,
    )
    if head["kind"] != kind:
        raise StoreCorrupt(f"stored bytes hold a {head['kind']}, wanted a {kind}")
    return head, writable[_aligned(_PREFIX.size + length) :]


def _pack(head: dict[str, Any]) -> bytes:
    return msgpack.packb(head, default=_plain, unicode_errors="surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, int):  # of more than 64 bits
        return msgpack.ExtType(_WIDE_INT, str(value).encode())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise DataError(f"cannot store a {type(value).__name__} ({value!r:.80}): metadata and turns hold JSON values only")


def _unpack_extension(code: int, data: bytes) -> Any:
    if code != _WIDE_INT:
        raise StoreCorrupt(f"stored rows hold an unknown extension {code}")
    return int(data)
