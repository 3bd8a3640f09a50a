"""Messages between scheduler and worker: a step is numbers, never phases.

token positions of one request in one step:

    0 ......... num_computed_tokens ......... num_tokens
    |  KV is in the blocks  |<- num_scheduled ->|
                            computed by this step; if it reaches num_tokens, the last row is sampled

and if the step also tries drafts, guesses at the tokens to come:

    0 ....... num_computed_tokens ... num_tokens ... num_tokens + drafts
    |  KV is in the blocks  |<------- num_scheduled ------->|
                                                every row from the last known token on is sampled, up to the first
                                                whose token is not the draft that follows it
"""

from __future__ import annotations

import msgspec

from octavo.messages.engine import TokenLogprobs
from octavo.messages.fault import RequestFault
from octavo.messages.kv_transfer import KVMove, KVTierReport
from octavo.messages.request_options import OutputOptions
from octavo.messages.sampling_params import SamplingParams


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request the worker does not know (new, or resubmitted after preemption)."""

    request_id: str
    token_ids: list[int]  # prompt, then any output made before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]  # the whole block table; with several KV groups, a block of each for every row of tokens
    sampling_params: SamplingParams
    sample_index: int = 0
    output: OutputOptions = OutputOptions()
    siblings: dict[str, int] = {}  # see SchedulerOutput


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request the worker knows: only what changed. Listed for every continuing request of the step."""

    request_id: str
    num_computed_tokens: int
    new_block_ids: list[int] = []  # appended to its block table,
    num_replaced: int = 0  # once its last ``num_replaced`` blocks are dropped (copy-on-write: they are others' now)


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step. The keys of ``num_scheduled_tokens`` are exactly the new + cached requests.

    A new request may read blocks that a request listed before it fills in this very step: K and V of all rows are
    written before any row attends. (Blocks filled by requests with prompt logprobs are read in later steps only.)

    ``siblings`` of a new request (id -> sample index) are samples of the same prompt: when it is sampled for the first
    time, each of them gets a token and logprobs of its own out of the same logits. They are no requests of the worker
    before they come as new ones.
    """

    step_id: int
    num_scheduled_tokens: dict[str, int]
    new_requests: list[NewRequestData] = []
    cached_requests: list[CachedRequestData] = []
    finished_request_ids: list[str] = []  # forget these first (finished, aborted or preempted)
    kv_moves: list[KVMove] = []  # between the pool and its tiers, in order, before anything else of the step
    block_copies: list[tuple[int, int]] = []  # (source, destination) block ids, run before the forward
    draft_token_ids: dict[str, list[int]] = {}  # those to try, of requests whose last known token is computed too

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def is_empty(self) -> bool:
        """Nothing to compute, move or forget: the only kind of plan that need not be executed."""
        return not (self.num_scheduled_tokens or self.finished_request_ids or self.kv_moves)


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step computed. A request whose chunk did not reach its last known token has no entry."""

    step_id: int
    sampled_token_ids: dict[str, list[int]] = {}  # one, or one more than the drafts that were right
    logprobs: dict[str, list[TokenLogprobs]] = {}  # one per sampled token, for requests that asked
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}  # for positions whose predecessor was computed in this step
    errors: dict[str, RequestFault] = {}  # requests that failed alone (NaN logits, a sampler exception)
    kv_tiers: dict[str, KVTierReport] = {}  # what became of moves, by tier
    draft_token_ids: dict[str, list[int]] = {}  # guesses at what follows the last token sampled, for the next plan
