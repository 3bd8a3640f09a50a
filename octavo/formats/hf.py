"""Readers of a Hugging Face model folder: JSON files and safetensors weights.

The safetensors library checks headers (sizes, overlaps, types) against the files; this module adds the shard index.
What the names and configurations mean is not known here.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.exceptions import FormatError, ModelNotFound, UnsupportedModel

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
INDEX_FILE = "model.safetensors.index.json"

# safetensors dtype -> NumPy dtype of the array handed out; formats NumPy lacks arrive as raw integers.
NUMPY_DTYPES: dict[str, str] = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
}


def read_json(folder: str | os.PathLike[str], name: str, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in ``folder/name``; ``{}`` if the file is absent and not ``required``.

    Raises ModelNotFound (absent) and FormatError (not JSON, or not an object).
    """
    path = Path(folder) / name
    try:
        text = path.read_bytes()
        value = json.loads(text)
        if _SURROGATE.search(text):  # pairs are fine; half of one is no text, and no library takes it
            json.dumps(value, ensure_ascii=False).encode()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not required:
            return {}
        raise ModelNotFound(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise FormatError(path, f"not JSON: {error.msg}", offset=error.pos) from error
    except (UnicodeError, RecursionError, OSError) as error:
        raise FormatError(path, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(path, f"must be a JSON object, is a {type(value).__name__}")
    return value


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """Tensors of the folder by name: read-only views of the mapped files, in the checkpoint's shapes.

    bf16 arrives as uint16 and fp8 as uint8 (``dtype_of`` says which). Shards are checked on construction, so a lookup
    fails only with KeyError. Raises ModelNotFound (no weights), FormatError (malformed, missing shard or tensor) and
    UnsupportedModel (weights in another format).
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._tensors: dict[str, tuple[_Shard, str, tuple[int, ...], int, int]] = {}
        for file, wanted in self._shards().items():
            shard = _Shard(self.folder / file)
            for name in wanted if wanted is not None else shard.entries:
                if name not in shard.entries:
                    raise FormatError(self.folder / INDEX_FILE, f"the tensor is not in {file}", key=name)
                self._tensors[name] = (shard, *shard.entries[name])

    def _shards(self) -> dict[str, list[str] | None]:
        """File name -> the tensors it must hold (None: whatever it holds)."""
        if (self.folder / INDEX_FILE).exists():
            return self._index()
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if "model.safetensors" in files:
            return {"model.safetensors": None}
        if len(files) == 1:
            return {files[0]: None}
        if files:
            raise FormatError(self.folder, f"{len(files)} safetensors files, but no {INDEX_FILE}")
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern))
        if others:
            raise UnsupportedModel(f"{self.folder}: weights in {others[0]}; octavo reads safetensors, not pickles")
        raise ModelNotFound(f"{self.folder}: no *.safetensors file")

    def _index(self) -> dict[str, list[str] | None]:
        path = self.folder / INDEX_FILE
        weight_map = read_json(self.folder, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(path, "must be a non-empty object", key="weight_map")
        by_file: dict[str, list[str] | None] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise FormatError(path, f"{file!r} is not the name of a file in the folder", key=name)
            names = by_file.setdefault(file, [])
            assert names is not None
            names.append(name)
        if missing := [file for file in by_file if not (self.folder / file).is_file()]:
            raise FormatError(path, f"{len(missing)} of {len(by_file)} shards are missing, first {missing[0]}")
        return by_file

    def __getitem__(self, name: str) -> np.ndarray:
        shard, dtype, shape, start, stop = self._tensors[name]
        return shard.view(NUMPY_DTYPES[dtype], shape, start, stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def dtype_of(self, name: str) -> str:
        """The dtype as safetensors writes it: ``"BF16"``, ``"F32"``, ..."""
        return self._tensors[name][1]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape, without touching the data."""
        return self._tensors[name][2]


class _Shard:
    """One mapped file. ``entries``: name -> (dtype, shape, first byte, past the last byte)."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy"):  # parses and checks the whole header, no data
                pass
        except (SafetensorError, OSError) as error:
            raise FormatError(path, str(error)) from error
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (header_bytes,) = struct.unpack_from("<Q", self._map)
        header = json.loads(self._map[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        self.entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, entry in header.items():
            if entry["dtype"] not in NUMPY_DTYPES:
                raise UnsupportedModel(f"{path}: tensor {name!r} has type {entry['dtype']}, which octavo lacks")
            start, stop = (8 + header_bytes + offset for offset in entry["data_offsets"])
            self.entries[name] = (entry["dtype"], tuple(entry["shape"]), start, stop)

    def view(self, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        item = np.dtype(dtype)
        array = np.frombuffer(self._map, dtype=item, count=(stop - start) // item.itemsize, offset=start)
        return np.require(array.reshape(shape), requirements="A")  # old writers left data unaligned: copy then
