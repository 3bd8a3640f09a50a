"""The border between the engine and kernels: ``Backend.prepare`` once, then ``Runnable.run`` once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.backends.sample_row import FIELDS
from octavo.config import KVDtype
from octavo.program import LayerKV, Program
from octavo.quantization.base import Weights

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]
SampleRows = npt.NDArray[Any]  # of SAMPLE_ROW
BitArray = npt.NDArray[np.uint32]
RowChoice = int | slice | npt.NDArray[np.integer]  # which rows of an output

# Instead of a sampled token, what was wrong with its row: a logit is NaN or infinite; the mask leaves no token.
NOT_FINITE, NOTHING_ALLOWED = -1, -2

SAMPLE_ROW = np.dtype([(name, kind) for name, kind, _ in FIELDS])


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

    G is the number of the program's KV groups: slots and tables of group 0 come first.

    token ids of request s are rows query_start_loc[s] .. query_start_loc[s+1]-1; the last of them is at position
    seq_lens[s]-1; slot = block_id * block_size + offset is where a token's K and V go.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [G * T]
    query_start_loc: Int32Array  # [S + 1]
    seq_lens: Int32Array  # [S], tokens in the KV cache after this step
    block_tables: Int32Array  # [G * S, B]
    logit_rows: Int32Array  # [R], row indices into T


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Of N rows, in their order. W is 1 + the greatest ``num_logprobs``, 0 when no row wants any."""

    token_ids: Int32Array  # [N]; NOT_FINITE or NOTHING_ALLOWED, and then nothing else is valid
    ranks: Int32Array  # [N], 1-based rank of the token among the logits, ties in token id order; valid with logprobs
    logprob_ids: Int32Array  # [N, W]: the token, then the most probable ones; 1 + num_logprobs entries are valid
    logprobs: npt.NDArray[np.float64]  # [N, W], log-softmax of the logits, at least -9999

    @classmethod
    def empty(cls, rows: SampleRows) -> SampledRows:
        """Room for the results of ``rows``."""
        width = 1 + int(rows["num_logprobs"].max(initial=-1))
        ids = np.empty((2, rows.size), np.int32)
        return cls(ids[0], ids[1], np.empty((rows.size, width), np.int32), np.empty((rows.size, width)))


class StepOutputs(Protocol):
    """What a run computed, by name (``Program.outputs``): valid until the next run of its Runnable.

    Opaque, so that a device may keep it to itself: rows come over when they are asked for.
    """

    def rows(self, output: str, chosen: RowChoice = slice(None)) -> FloatArray:
        """Rows of an output, float32 ``[rows, width]``, or ``[width]`` of a single one; valid as long.

        "logits" has the rows that the step's ``logit_rows`` say, "hidden" a row per token. Raises KernelError for an
        output that the program does not have.
        """
        ...

    def sample(self, rows: SampleRows, adjusted: FloatArray | None, masks: BitArray | None) -> SampledRows:
        """Choose tokens from the logits. ``adjusted``: [M, vocab_size], rows changed by processors.

        ``masks``: [K, W] with 32 * W >= vocab_size; token t may be chosen if bit t % 32 of word t // 32 is set.

        A row's result is a function of its logits and its SAMPLE_ROW alone. -inf in ``adjusted`` excludes a token;
        the maximum of each of its rows is finite. Releases the GIL. Raises KernelError for a row that is not there.
        """
        ...


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

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Write K and V to the slots, compute the program's outputs, which are valid until the next call.

        Releases the GIL where kernels are native. Raises KernelError on sizes beyond the Limits.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks (source, destination), all layers, in order."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers, scales included."""
        ...

    @property
    def kv_identity(self) -> str:
        """What the bits of K and V, and their order in a block, depend on besides weights and tokens."""
        ...

    def read_blocks(self, block_ids: Sequence[int], out: ByteArray) -> None:
        """Copy whole blocks to ``out`` [N, block_bytes], as they lie in memory. Raises KernelError."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: ByteArray) -> None:
        """Copy ``data`` [N, block_bytes] over whole blocks. Raises KernelError."""
        ...


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a prepared model takes, and one block of its KV cache."""

    weights: int  # packed: ``Runnable.weight_bytes``
    activations: int  # buffers of the largest step within the Limits, logits included
    sampling: int  # scratch memory of the backend's own sampler
    packing: int  # most bytes beside, while weights are packed; not while packed ones are read from a cache
    kv_block: int  # from a block to the next: ``Runnable.block_bytes``


class Backend(Protocol):
    """A set of kernels for one kind of hardware."""

    name: str

    def describe(self) -> str:
        """One line for the start-up screen: ISA and threads."""
        ...

    def kv_bytes(self, layer: LayerKV, kv_dtype: KVDtype = "auto") -> int:
        """Bytes that K and V of one token take in ``layer``, scales included, what kernels pad them with not."""
        ...

    def footprint(self, program: Program, weights: Weights, limits: Limits) -> Footprint:
        """What ``prepare`` would take; ``weights`` may be outlines. Raises KernelError as that."""
        ...

    def prepare(self, program: Program, weights: Weights, limits: Limits) -> Runnable:
        """Pack weights, plan buffers, allocate the KV cache. Raises KernelError naming an op it cannot run."""
        ...
