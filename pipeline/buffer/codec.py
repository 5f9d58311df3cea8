"""Groups, samples and columns as compact bytes, and back.

Invariant: decode(encode(x)) equals x bit by bit, NaN included. The form is a msgpack header (scalars, task, lengths) and one
little-endian block per array, concatenated over samples; it holds no pickled object, so that reading it runs no code.

Integers of a sample's arrays are stored as narrow as they are, or as runs: most bytes of a group are there only for the arrays'
types, and each byte is copied, hashed, sent and written.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
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
_scalars = attrgetter(*_SCALARS)
_PREFIX = struct.Struct("<4sI")
_MAGIC = b"RPB2"
_ALIGN = 16
_WIDE_INT = 1
_NARROW = ((1 << 8, np.dtype("<u1")), (1 << 16, np.dtype("<u2")))
_RUN_LENGTH = np.dtype("<u4")
_PART_TOKENS = 128 * 1024
"""Samples are encoded about so many tokens at a time: what is made on the way to the stored bytes stays in the processor's cache.
Belongs to the form: another number reads other blocks."""

Form = int | Sequence[Any]
"""How integers are stored: as the one value that all of them have; or (type, None), as values of this type, which may be narrower;
or (type, runs), as the values of so many runs, and the runs' lengths."""

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
    }
    return _join_samples(head, group.samples)


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
    return _join_samples({"kind": "sample"}, (sample,))


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


def _join_samples(head: dict[str, Any], samples: Sequence[Sample]) -> bytes:
    _check_arrays(samples)
    lengths = [len(sample.token_ids) for sample in samples]
    parts = _parts(lengths)
    packed = [_packed([getattr(sample, name) for sample in samples[part]], dtype) for part in parts for name, dtype in ARRAYS]
    head |= {"samples": list(map(_scalars, samples)), "lengths": lengths, "forms": [form for form, _ in packed]}
    return _join(head, [block for _, blocks in packed for block in blocks])


def _parts(lengths: Sequence[int]) -> list[slice]:
    """Which samples are stored side by side: those of one slice, array by array. Follows from the lengths, which are stored."""
    step = max(1, _PART_TOKENS // max([1, *lengths]))
    return [slice(start, start + step) for start in range(0, len(lengths), step)]


def _check_arrays(samples: Sequence[Sample]) -> None:
    for sample in samples:
        shape = (len(sample.token_ids),)
        for name, dtype in ARRAYS:
            array = getattr(sample, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise DataError(f"sample {sample.sample_id}: {name} is {got}, wanted {dtype.name} ({len(sample.token_ids)},)")


def _packed(arrays: list[np.ndarray], dtype: np.dtype) -> tuple[Form, list[list[np.ndarray]]]:
    """The form, and the blocks of it."""
    if dtype.kind == "f" or not any(map(len, arrays)):
        return (dtype.str, None), [[_raw(array, dtype) for array in arrays]]
    values = np.concatenate(arrays)
    low, high = int(values.min()), int(values.max())
    if low == high:
        return low, []
    stored = next((narrow for end, narrow in _NARROW if 0 <= low and high < end), dtype)
    differs = values[1:] != values[:-1]
    runs = 1 + int(np.count_nonzero(differs))
    if runs * (stored.itemsize + _RUN_LENGTH.itemsize) >= values.size * stored.itemsize:
        return (stored.str, None), [[values.astype(stored, copy=False)]]
    starts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    lengths = np.diff(starts, append=values.size)
    return (stored.str, runs), [[values[starts].astype(stored, copy=False)], [lengths.astype(_RUN_LENGTH)]]


def _samples(head: dict[str, Any], body: memoryview) -> tuple[Sample, ...]:
    lengths, forms = head["lengths"], iter(head["forms"])
    samples, start = [], 0
    for part in _parts(lengths):
        total, unpacked = sum(lengths[part]), {}
        for name, dtype in ARRAYS:
            unpacked[name], start = _unpacked(body, start, dtype, total, next(forms))
        at = 0
        for values, length in zip(head["samples"][part], lengths[part], strict=True):
            scalars = dict(zip(_SCALARS, values, strict=True))
            arrays = {name: array[at : at + length] for name, array in unpacked.items()}
            scalars["turns"] = tuple(scalars["turns"])
            samples.append(Sample(**scalars, **arrays))
            at += length
    return tuple(samples)


def _unpacked(body: memoryview, start: int, dtype: np.dtype, total: int, form: Form) -> tuple[np.ndarray, int]:
    """`total` values of type dtype, and where the next block begins."""
    if isinstance(form, int):
        return np.full(total, form, dtype), start
    stored, runs = np.dtype(form[0]), form[1]
    count = total if runs is None else runs
    values, start = _block(body, start, stored, count).astype(dtype, copy=False), _aligned(start + count * stored.itemsize)
    if runs is None:
        return values, start
    lengths = _block(body, start, _RUN_LENGTH, runs)
    if lengths.sum() != total:
        raise StoreCorrupt(f"stored runs are {lengths.sum()} values long, wanted {total}")
    return np.repeat(values, lengths), _aligned(start + lengths.nbytes)


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
