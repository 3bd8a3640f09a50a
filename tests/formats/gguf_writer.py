"""Writes small GGUF files for tests, well formed unless asked otherwise (independent of octavo's reader)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

CODES = {
    **{"UINT8": (0, "B"), "INT8": (1, "b"), "UINT16": (2, "H"), "INT16": (3, "h"), "UINT32": (4, "I")},
    **{"INT32": (5, "i"), "FLOAT32": (6, "f"), "BOOL": (7, "?"), "UINT64": (10, "Q"), "INT64": (11, "q")},
    **{"FLOAT64": (12, "d")},
}
TYPE_NUMBERS = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q2_K": 10, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30},
}


def pack_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack_value(kind: str, value: Any) -> bytes:
    """Type number and value; ``kind`` is ``"UINT32"``, ``"STRING"`` or ``"ARRAY[FLOAT32]"``."""
    if kind == "STRING":
        return struct.pack("<I", 8) + pack_string(value)
    if kind.startswith("ARRAY["):
        element = kind[6:-1]
        if element == "STRING":
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(pack_string, value))
        number, code = CODES[element]
        return struct.pack("<IIQ", 9, number, len(value)) + struct.pack(f"<{len(value)}{code}", *value)
    number, code = CODES[kind]
    return struct.pack("<I", number) + struct.pack("<" + code, value)


def infer_kind(value: Any) -> str:
    """The usual GGUF type of a Python value."""
    if isinstance(value, list):
        return f"ARRAY[{infer_kind(value[0]) if value else 'STRING'}]"
    names = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return names[type(value)]


def pack_entry(name: str, dims: tuple[int, ...], type_number: int, offset: int) -> bytes:
    """One line of the tensor directory; ``dims`` fastest first."""
    return pack_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_number, offset)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], str, bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file. Metadata values are plain or ``(kind, value)``; tensors are ``name -> (NumPy shape, type, bytes)``."""
    pairs = b""
    for key, value in metadata.items():
        kind, plain = value if isinstance(value, tuple) else (infer_kind(value), value)
        pairs += pack_string(key) + pack_value(kind, plain)
    directory, data = b"", b""
    for name, (shape, type_name, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        directory += pack_entry(name, shape[::-1], TYPE_NUMBERS[type_name], len(data))
        data += raw
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + pairs + directory
    return head + b"\0" * (-len(head) % alignment) + data


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Any] | None = None, **options: Any) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors or {}, **options))
    return path
