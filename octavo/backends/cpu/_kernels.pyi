"""Types of the native module (csrc/bindings.cpp). Addresses are ints; a Place is (first float, floats between rows)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Place = tuple[int, int]

_KvLayer = tuple[int, int, int, int]  # group, KV heads, key_dim, value_dim

def block_bytes(kv_layers: Sequence[_KvLayer], block_size: int, kv_format: str) -> int: ...
def usable_isas() -> list[str]: ...

class Memory:
    def __init__(self, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class PartShape:
    def __init__(
        self,
        format: int,
        n: int,
        k: int,
        group: int = 0,
        centred: bool = False,
        has_minimum: bool = False,
        scales: int = 0,
    ) -> None: ...

class LinearPart:
    def __init__(self, shape: PartShape, panels: int) -> None: ...

class Kernels:
    def __init__(self, isa: str = "") -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def features(self) -> str: ...
    @property
    def row_ops(self) -> frozenset[str]: ...
    def packed_bytes(self, shape: PartShape) -> int: ...
    def pack(
        self,
        pool: ThreadPool,
        shape: PartShape,
        panels: int,
        data: int,
        scale: int,
        minimum: int,
        scale_unit: int,
        minimum_unit: int,
    ) -> None: ...
    def scratch_bytes(self, parts: Sequence[LinearPart], rows: int) -> int: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Program:
    def __init__(
        self,
        kernels: Kernels,
        pool: ThreadPool,
        *,
        tokens: int,
        rows: int,
        sequences: int,
        blocks_per_seq: int,
        blocks: int,
        block_size: int,
        vocab_size: int,
        max_position: int,
        kv_layers: Sequence[_KvLayer],
        groups: int,
        arena_floats: int,
        kv_format: str = "bfloat16",
    ) -> None: ...
    def add_weights(self, parts: Sequence[LinearPart], bias: int) -> int: ...
    def begin_rows(self, per_token: bool) -> None: ...
    def add(self, kind: str, args: Mapping[str, Any]) -> None: ...
    def set_logits(self, logits: _Place) -> None: ...
    def run(
        self,
        token_ids: _Int32,
        positions: _Int32,
        slot_mapping: _Int32,
        query_start_loc: _Int32,
        seq_lens: _Int32,
        block_tables: _Int32,
        logit_rows: _Int32,
    ) -> None: ...
    def rows_at(self, place: _Place, width: int, per_token: bool) -> npt.NDArray[np.float32]: ...
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...
    def measure(self, on: bool) -> None: ...
    def measurements(self) -> list[tuple[str, float]]: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_address(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Bits = npt.NDArray[np.uint32]
_Doubles = npt.NDArray[np.float64]

class Sampler:
    """Rows of logits to tokens (csrc/bindings_sampler.cpp); ``rows`` is an array of SAMPLE_ROW as bytes."""

    def __init__(self, pool: ThreadPool, isa: str = "") -> None: ...
    def sample(
        self,
        logits: _Floats,
        adjusted: _Floats | None,
        masks: _Bits | None,
        rows: _Bytes,
        token_ids: _Int32,
        ranks: _Int32,
        logprob_ids: _Int32,
        logprobs: _Doubles,
    ) -> None: ...
    def sample_step(
        self,
        program: Program,
        adjusted: _Floats | None,
        masks: _Bits | None,
        rows: _Bytes,
        token_ids: _Int32,
        ranks: _Int32,
        logprob_ids: _Int32,
        logprobs: _Doubles,
    ) -> None: ...

def uniform(seed: int, sample_index: int, position: int) -> float: ...

class LinearProbe:
    """A single linear for tests and measurements (csrc/bindings_linear.cpp)."""

    def __init__(self, isa: str = "", threads: int = 1) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
