"""A strict reader of GGUF v2/v3, little endian: metadata and tensors of one file, memory-mapped.

Spec: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is not trusted: every count, length, offset
and alignment is compared with the file's size in Python's unbounded integers *before* anything is read or allocated, so
the cost of a malformed file is bounded by its real size. What the numbers mean (architectures, tokenizers, how blocks
dequantise) is not known here.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from octavo.exceptions import FormatError, ModelNotFound, UnsupportedModel

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_TENSOR_NAME_BYTES = 255
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_BYTES = 1 << 50  # of a file of which only the beginning is there
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays together: each becomes a Python object (largest vocabularies: 1.3 million)

# Metadata value types, by the number in the file.
SCALARS: dict[int, tuple[str, str]] = {
    0: ("UINT8", "B"),
    1: ("INT8", "b"),
    2: ("UINT16", "H"),
    3: ("INT16", "h"),
    4: ("UINT32", "I"),
    5: ("INT32", "i"),
    6: ("FLOAT32", "f"),
    7: ("BOOL", "B"),
    10: ("UINT64", "Q"),
    11: ("INT64", "q"),
    12: ("FLOAT64", "d"),
}
BOOL, STRING, ARRAY = 7, 8, 9

# Tensor types octavo reads: number in the file -> (name, elements per block, bytes per block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Tensor types that exist but octavo lacks; any other number is a malformed file.
OTHER_TENSOR_TYPES: dict[int, str] = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
# Keys whose type the spec fixes and on which reading or tokenising relies.
KNOWN_KEY_TYPES: dict[str, str] = {
    "general.alignment": "UINT32",
    "general.architecture": "STRING",
    "tokenizer.chat_template": "STRING",
    "tokenizer.ggml.model": "STRING",
    "tokenizer.ggml.pre": "STRING",
    "tokenizer.ggml.tokens": "ARRAY[STRING]",
    "tokenizer.ggml.merges": "ARRAY[STRING]",
    "tokenizer.ggml.scores": "ARRAY[FLOAT32]",
    "tokenizer.ggml.token_type": "ARRAY[INT32]",
    "tokenizer.ggml.bos_token_id": "UINT32",
    "tokenizer.ggml.eos_token_id": "UINT32",
    "tokenizer.ggml.eot_token_id": "UINT32",
    "tokenizer.ggml.unknown_token_id": "UINT32",
    "tokenizer.ggml.add_bos_token": "BOOL",
    "tokenizer.ggml.add_eos_token": "BOOL",
    "tokenizer.ggml.add_space_prefix": "BOOL",
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. ``shape`` is in NumPy order, rows first; ``data``: raw bytes, a uint8 view of the mapped file."""

    name: str
    shape: tuple[int, ...]
    type: str  # a name of TENSOR_TYPES
    data: np.ndarray


@dataclass(frozen=True)
class _Entry:
    """A tensor as the directory states it, already checked on its own; ``start`` counts from the data section."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int
    where: int  # file offset of the entry


class GGUFFile:
    """The parsed file at ``path``; the mapping lives as long as this object or any tensor's ``data``.

    ``metadata`` maps keys to int, float, bool, str or lists of one of them; ``value_types`` to the type as written
    (``"UINT32"``, ``"ARRAY[STRING]"``). Raises ModelNotFound (no such file), FormatError (malformed) and
    UnsupportedModel (a version, split or tensor type octavo lacks).

    Not ``whole``: the file may end after its directory of tensors; ``data`` of those that are not all there is empty.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole: bool = True):
        self.path = os.fspath(path)
        self._map = _map_file(self.path)
        cursor = _Cursor(self.path, self._map)
        tensor_count, kv_count = _read_header(cursor)
        self.metadata: dict[str, Any] = {}
        self.value_types: dict[str, str] = {}
        for _ in range(kv_count):
            self._read_pair(cursor)
        self.alignment = self._check_alignment()
        self._check_split()
        present = len(self._map)
        size = present if whole else MAX_BYTES
        entries = [_read_entry(cursor, self.alignment, size) for _ in range(tensor_count)]
        self._check_block_count(tensor_count)
        data_start = -(-cursor.pos // self.alignment) * self.alignment if entries else cursor.pos
        _check_layout(self.path, entries, data_start, size)
        raw = np.frombuffer(self._map, dtype=np.uint8)
        self.tensors: dict[str, GGUFTensor] = {}
        for e in entries:
            begin, end = data_start + e.start, data_start + e.start + e.nbytes
            self.tensors[e.name] = GGUFTensor(e.name, e.shape, e.type, raw[begin : end if end <= present else begin])

    def __repr__(self) -> str:
        return f"GGUFFile({self.path!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"

    def _read_pair(self, cursor: _Cursor) -> None:
        where = cursor.pos
        key = cursor.string("metadata key", MAX_KEY_BYTES)
        if not key:
            cursor.fail("empty metadata key", offset=where)
        if key in self.metadata:
            cursor.fail("the key appears twice", key=key, offset=where)
        cursor.key = key
        type_name, value = cursor.value()
        expected = KNOWN_KEY_TYPES.get(key, type_name)
        if type_name != expected:
            cursor.fail(f"type is {type_name}, must be {expected}", offset=where)
        cursor.key = None
        self.metadata[key], self.value_types[key] = value, type_name

    def _check_alignment(self) -> int:
        alignment: int = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            reason = f"alignment is {alignment}, must be a power of two in [8, 2^20]"
            raise FormatError(self.path, reason, key="general.alignment")
        return alignment

    def _check_split(self) -> None:
        count = self.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            raise UnsupportedModel(f"{self.path}: one of {count} parts of a split GGUF; merge the parts into one file")

    def _check_block_count(self, tensor_count: int) -> None:
        """A layer has at least one tensor, so no honest file states more layers than tensors."""
        key = f"{self.metadata.get('general.architecture', '')}.block_count"
        count = self.metadata.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= tensor_count:
            raise FormatError(self.path, f"{count!r} layers, but the file has {tensor_count} tensors", key=key)


class _Cursor:
    """A read position in the mapped file; ``key`` names what is being read, for error messages."""

    def __init__(self, path: str, buffer: mmap.mmap):
        self.path, self.buffer, self.size = path, buffer, len(buffer)
        self.pos = 0
        self.key: str | None = None
        self._elements = 0

    def fail(self, reason: str, *, key: str | None = None, offset: int | None = None) -> NoReturn:
        raise FormatError(self.path, reason, key=key or self.key, offset=self.pos if offset is None else offset)

    @property
    def remaining(self) -> int:
        return self.size - self.pos

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.remaining:
            self.fail(f"{what} needs {nbytes} bytes, but only {self.remaining} are left in the file")

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.pos += 4
        return int(_U32.unpack_from(self.buffer, self.pos - 4)[0])

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.pos += 8
        return int(_U64.unpack_from(self.buffer, self.pos - 8)[0])

    def string(self, what: str, limit: int | None = None) -> str:
        where = self.pos
        length = self.u64(f"length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, at most {limit} are allowed", offset=where)
        self.need(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}", offset=where)

    def value(self) -> tuple[str, Any]:
        """One metadata value with the name of its type."""
        where = self.pos
        kind = self.u32("type of value")
        if kind == STRING:
            return "STRING", self.string("string")
        if kind in SCALARS:
            name, code = SCALARS[kind]
            return name, self._numbers(code, 1, kind)[0]
        if kind != ARRAY:
            self.fail(f"unknown value type {kind}", offset=where)
        element = self.u32("type of array elements")
        count = self.u64("length of array")
        self._elements += count
        if self._elements > MAX_ARRAY_ELEMENTS:
            self.fail(f"arrays of more than {MAX_ARRAY_ELEMENTS} elements in all", offset=where)
        if element == STRING:
            return "ARRAY[STRING]", self._strings(count)
        if element in SCALARS:
            name, code = SCALARS[element]
            return f"ARRAY[{name}]", self._numbers(code, count, element)
        reason = "arrays of arrays are not supported" if element == ARRAY else f"unknown element type {element}"
        self.fail(reason, offset=where)

    def _numbers(self, code: str, count: int, kind: int) -> list[Any]:
        self.need(count * struct.calcsize("<" + code), f"{count} values of {SCALARS[kind][0]}")
        dtype = np.dtype("<f8" if code == "d" else f"<{code}")
        where = self.pos
        array = np.frombuffer(self.buffer, dtype=dtype, count=count, offset=where)
        self.pos += array.nbytes
        if kind != BOOL:
            return array.tolist()
        if count and array.max() > 1:
            self.fail("a bool is neither 0 nor 1", offset=where)
        return array.astype(bool).tolist()

    def _strings(self, count: int) -> list[str]:
        """``count`` strings. Vocabularies are long and start-up waits for this loop, so it is kept bare: a length that
        leaves the file makes the next read, or the last check, fail; a slice never allocates more than the file has."""
        self.need(count * 8, f"{count} strings")
        buffer, pos, unpack = self.buffer, self.pos, _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(buffer, pos)[0]
                append(buffer[start:pos].decode())
        except UnicodeDecodeError as error:
            self.fail(f"string {len(out)} is not UTF-8: {error.reason}", offset=start - 8)
        except (struct.error, OverflowError):
            self.fail(f"string {len(out) - 1} of {count} runs past the end of the file", offset=start - 8)
        if pos > self.size:
            self.fail(f"string {len(out) - 1} of {count} runs past the end of the file", offset=start - 8)
        self.pos = pos
        return out


def _map_file(path: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise FormatError(path, f"{size} bytes are too few for a GGUF header", offset=0)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ModelNotFound(f"{path}: {error.strerror}") from error


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(tensors, metadata pairs), each checked against the fewest bytes that so many could take."""
    if cursor.buffer[:4] != MAGIC:
        cursor.fail(f"not a GGUF file: it begins with {cursor.buffer[:4]!r}")
    cursor.pos = 4
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(f"{cursor.path}: a big-endian GGUF file")
    if version not in (2, 3):
        raise UnsupportedModel(f"{cursor.path}: GGUF version {version}; octavo reads 2 and 3")
    where = cursor.pos
    tensor_count, kv_count = cursor.u64("number of tensors"), cursor.u64("number of metadata pairs")
    limits = ((tensor_count, 32, MAX_TENSORS, "tensors"), (kv_count, 13, MAX_PAIRS, "metadata pairs"))
    for count, least, most, what in limits:
        if count > most:
            cursor.fail(f"{count} {what}, at most {most} are allowed", offset=where)
        if count * least > cursor.remaining:
            cursor.fail(f"{count} {what} cannot fit into {cursor.remaining} bytes", offset=where)
    return tensor_count, kv_count


def _read_entry(cursor: _Cursor, alignment: int, size: int) -> _Entry:
    """One line of the directory of a file of ``size`` bytes."""
    where = cursor.pos
    name = cursor.string("tensor name", MAX_TENSOR_NAME_BYTES)
    cursor.key = name
    n_dims = cursor.u32("number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"{n_dims} dimensions, must be 1 to {MAX_DIMS}", offset=where)
    dims = tuple(cursor.u64("dimension") for _ in range(n_dims))  # fastest first, as ggml counts
    kind = cursor.u32("tensor type")
    start = cursor.u64("tensor offset")
    if kind in OTHER_TENSOR_TYPES:
        raise UnsupportedModel(
            f"{cursor.path}: tensor {name!r} has type {OTHER_TENSOR_TYPES[kind]}, which octavo lacks"
        )
    if kind not in TENSOR_TYPES:
        cursor.fail(f"unknown tensor type {kind}", offset=where)
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    elements = math.prod(dims)
    if elements == 0 or dims[0] % block:
        cursor.fail(f"shape {dims} is empty or not a multiple of {type_name}'s block of {block}", offset=where)
    if start % alignment:
        cursor.fail(f"data offset {start} is not a multiple of the alignment {alignment}", offset=where)
    nbytes = elements // block * block_bytes
    if start + nbytes > size:
        cursor.fail(f"{nbytes} bytes at data offset {start} leave the file of {size} bytes", offset=where)
    cursor.key = None
    return _Entry(name, dims[::-1], type_name, start, nbytes, where)


def _check_layout(path: str, entries: list[_Entry], data_start: int, size: int) -> None:
    """Names are unique, and the tensors lie inside the data section without overlap."""
    for twice in _repeated(entries):
        raise FormatError(path, "the tensor name appears twice", key=twice.name, offset=twice.where)
    end, previous = 0, ""
    for e in sorted(entries, key=lambda e: e.start):
        if e.start < end:
            raise FormatError(path, f"the data overlaps that of tensor {previous!r}", key=e.name, offset=e.where)
        end, previous = e.start + e.nbytes, e.name
        if data_start + end > size:
            reason = f"the data ends at byte {data_start + end}, but the file has {size}"
            raise FormatError(path, reason, key=e.name, offset=e.where)


def _repeated(entries: list[_Entry]) -> Iterator[_Entry]:
    seen: set[str] = set()
    for e in entries:
        if e.name in seen:
            yield e
        seen.add(e.name)
