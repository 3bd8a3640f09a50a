"""The border between the engine and kernels: ``Backend.prepare`` once, then ``Runnable.run`` once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from octavo.program import Program
from octavo.quantization.base import Weights

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
KVDtype = Literal["auto", "bfloat16", "int8"]  # auto: the backend's own


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes for which static buffers are planned. KV memory is ``num_blocks`` blocks of ``block_size`` tokens."""

    max_tokens: int  # T at most
    max_rows: int  # R at most
    max_seqs: int  # S at most
    max_blocks_per_seq: int  # B, width of block_tables
    num_blocks: int  # including block 0, the null block
    block_size: int
    kv_dtype: KVDtype = "auto"  # how K and V are stored


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, as C-contiguous int32 arrays. Requests are concatenated (varlen).

    token ids of request s are rows query_start_loc[s] .. query_start_loc[s+1]-1; the last of them is at position
    seq_lens[s]-1; slot = block_id * block_size + offset is where a token's K and V go.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [T]
    query_start_loc: Int32Array  # [S + 1]
    seq_lens: Int32Array  # [S], tokens in the KV cache after this step
    block_tables: Int32Array  # [S, B]
    logit_rows: Int32Array  # [R], row indices into T


class Runnable(Protocol):
    """A prepared model with its KV cache."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights."""
        ...

    @property
    def weight_origin(self) -> str:
        """How the weights came to be in memory, in a few words for the start-up screen."""
        ...

    def run(self, inputs: StepInputs) -> FloatArray:
        """Write K and V to the slots, return float32 logits ``[R, vocab_size]``, valid until the next call.

        Releases the GIL where kernels are native. Raises KernelError on sizes beyond the Limits.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks (source, destination), all layers, in order."""
        ...


class Backend(Protocol):
    """A set of kernels for one kind of hardware."""

    name: str

    def describe(self) -> str:
        """One line for the start-up screen: ISA and threads."""
        ...

    def kv_element_size(self, kv_dtype: KVDtype = "auto") -> int:
        """Bytes per number in the KV cache."""
        ...

    def kv_scale_size(self, kv_dtype: KVDtype = "auto") -> int:
        """Bytes of the scale of one token's K, or V, of one head; 0 where numbers need none."""
        ...

    def prepare(self, program: Program, weights: Weights, limits: Limits) -> Runnable:
        """Pack weights, plan buffers, allocate the KV cache. Raises KernelError naming an op it cannot run."""
        ...
