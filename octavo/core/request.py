"""Request: all that the engine core knows about one sequence. Knows nothing of blocks, queues or other requests.

Lengths, in tokens (their order is an invariant):

    0 ... num_computed_tokens ... num_tokens ... num_tokens + num_placeholders ... limit
    |  KV is, or by the plans    | known ids    | sampled by steps in flight,    | ends here with
    |  sent so far will be,      |              | ids not here yet (with drafts: | reason "length"
    |  in the blocks             |              | at most so many)               |

``num_confirmed_tokens <= num_computed_tokens``: those whose steps have come back without an error.
(``num_computed_tokens`` may pass ``num_tokens``: a step in flight computes the KV of a token still being sampled.)
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.drafts import Drafts
from octavo.core.kv_cache.hashing import Extra, hash_block
from octavo.core.repetition import repetition_detector
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestFacts,
    RequestFault,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from octavo.core.sample_group import SampleGroup

REPEATED = "repetition_detected"  # vLLM's stop_reason


class RequestStatus(enum.Enum):
    """Where a request is. PREEMPTED requests wait too, but have run before; PARKED ones are only there to be forked."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


_NUMBERS = itertools.count()


class Request:
    """One sequence and its life cycle. ``number`` is unique in this process, and greater the later it was made.

    ``epoch`` counts its stays in the running set: a step's result is valid only if the request is still in the epoch
    in which the step was planned. ``sample_group`` says what a sampled token leads to, beside a longer request.
    """

    __slots__ = (
        "_eos_token_ids",
        "_is_counted",
        "_packed",
        "_repetition",
        "_stop_token_ids",
        "_told_facts",
        "block_hashes",
        "drafts",
        "epoch",
        "facts",
        "limit",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_drafts",
        "num_placeholders",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "number",
        "request_id",
        "sample_group",
        "sampling_params",
        "source",
        "status",
        "token_ids",
    )

    def __init__(self, source: EngineCoreRequest, sample_group: SampleGroup, *, limit: int, queued_time: float) -> None:
        """``limit``: number of tokens, prompt included, at which the request ends with reason "length"."""
        self.number = next(_NUMBERS)
        self.source = source
        self.sample_group = sample_group
        self.request_id = source.request_id
        self.sampling_params = source.sampling_params
        self.token_ids = list(source.prompt_token_ids)  # the prompt, then the output
        self.num_prompt_tokens = len(self.token_ids)
        self.limit = limit
        self.status = RequestStatus.WAITING
        self.epoch = 0
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.num_placeholders = 0
        self.drafts = Drafts()
        self.num_drafts = 0  # tried by the step in flight
        self.num_prompt_logprobs = 0  # scored positions of the prompt already sent to the front end
        self.facts = RequestFacts(queued_time=queued_time)  # cached tokens: as the first step that came back found them
        self.block_hashes: list[bytes] = []  # of the full blocks of token_ids, as far as they were asked for
        self._packed = bytearray()
        self._told_facts: RequestFacts | None = None  # those that the front end has
        self._is_counted = False
        self._repetition = repetition_detector(self.sampling_params.repetition_detection)
        self._eos_token_ids = source.output.eos_token_ids
        self._stop_token_ids = frozenset(self.sampling_params.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seats(self) -> int:
        """Sequences it will be in the batch: itself, and each sample that it has still to give birth to."""
        return 1 + self.sample_group.num_unborn

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Tokens that could be computed now, drafts not counted.

        0 while steps in flight already hold its last token, or will tell how many of its drafts are right.
        """
        end = len(self.token_ids) + self.num_placeholders
        return end - self.num_computed_tokens if end < self.limit and not self.num_drafts else 0

    @property
    def num_covered_tokens(self) -> int:
        """Tokens that its blocks were taken for: more than are computed, where drafts were wrong."""
        return max(self.num_computed_tokens, self.drafts.reach)

    @property
    def next_scored_position(self) -> int:
        """First prompt position whose logits have not been scored yet (of a request that wants prompt logprobs)."""
        return self.sampling_params.prompt_logprob_start + self.num_prompt_logprobs

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Prompt logprobs were asked for and not all are sent: the logits of those positions are needed."""
        return self.sampling_params.wants_prompt_logprobs and self.next_scored_position < self.num_prompt_tokens - 1

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose KV may come from the prefix cache; of the others the logits are needed."""
        if self.sampling_params.skip_reading_prefix_cache:
            return 0
        last = len(self.token_ids) - 1
        return min(last, self.next_scored_position) if self.owes_prompt_logprobs else last

    @property
    def holds_blocks(self) -> bool:
        """It has a block table: it runs, or was forked, or is there to be forked."""
        return self.status is RequestStatus.RUNNING or self.num_computed_tokens > 0

    @property
    def namespace(self) -> Sequence[Extra]:
        """Tagged facts besides the tokens that its KV depends on: within a namespace, equal prefixes have equal KV."""
        salt = self.source.cache.salt
        return (("cache_salt", salt),) if salt is not None else ()

    def extras(self, block_index: int) -> Sequence[Extra]:
        """What goes into a block's hash besides its tokens: into the first one's, the namespace."""
        return self.namespace if block_index == 0 else ()

    def packed(self) -> bytearray:
        """The known token ids, four bytes each. Only equality means something. Not to be changed."""
        known = len(self._packed) // 4
        if known < len(self.token_ids):
            self._packed += array("i", self.token_ids[known:]).tobytes()
        return self._packed

    def hashes(self, block_size: int) -> list[bytes]:
        """Chained hashes of all full blocks of the known tokens."""
        known = self.block_hashes
        for i in range(len(known), len(self.token_ids) // block_size):
            tokens = self.token_ids[i * block_size : (i + 1) * block_size]
            known.append(hash_block(known[-1] if known else None, tokens, self.extras(i)))
        return known

    def is_late(self, now: float) -> bool:
        """Its deadline has passed: its caller waits no longer."""
        deadline = self.source.deadline
        return deadline is not None and now >= deadline

    def advance(self, num_tokens: int) -> bool:
        """Count ``num_tokens`` as computed by a new step; True if that step samples the next token."""
        self.num_computed_tokens += num_tokens
        samples = self.num_computed_tokens == len(self.token_ids) + self.num_placeholders
        if samples:
            self.num_placeholders += 1
        return samples

    def speculate(self, num_drafts: int) -> None:
        """The step planned last computes so many drafts too, and samples up to so many tokens more."""
        self.num_drafts = num_drafts
        self.num_placeholders += num_drafts
        self.num_computed_tokens += num_drafts
        self.drafts.reach = max(self.drafts.reach, self.num_computed_tokens)

    def retract(self, num_wrong: int) -> None:
        """The step that tried drafts is back; so many of them were wrong, and what is computed of them is void."""
        self.num_placeholders -= self.num_drafts
        self.num_drafts = 0
        self.num_computed_tokens -= num_wrong
        self.num_confirmed_tokens -= num_wrong

    def start(self, num_cached_tokens: int, now: float, *, num_external: int = 0) -> None:
        """Enter the running set with ``num_cached_tokens`` in its blocks, the last ``num_external`` by this step."""
        if self.facts.scheduled_time is None:
            self.note(scheduled_time=now)
        if not self._is_counted:
            self.note(num_cached_tokens=num_cached_tokens, num_external_tokens=num_external)
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = num_cached_tokens
        self.num_confirmed_tokens = num_cached_tokens - num_external

    def note(self, **facts: Any) -> None:
        """``facts``, fields of RequestFacts, are known now. The next output tells them."""
        self.facts = msgspec.structs.replace(self.facts, **facts)

    def confirm(self, num_tokens: int) -> None:
        """A step came back: the first ``num_tokens`` are in the blocks."""
        self.num_confirmed_tokens = num_tokens
        self._is_counted = True

    def fork(self, source: EngineCoreRequest, sample_group: SampleGroup, *, limit: int) -> Request:
        """A request that goes on from all known tokens of this one, without blocks, its facts told as its own."""
        child = Request(source, sample_group, limit=limit, queued_time=0.0)
        child.token_ids = list(self.token_ids)
        child.num_prompt_tokens = self.num_prompt_tokens
        child.block_hashes = list(self.block_hashes)
        child.facts = self.facts
        child._is_counted = True
        return child

    def hold(self, num_tokens: int) -> None:
        """The first ``num_tokens`` are in its block table, though it does not run; 0: it has none any more."""
        self.num_computed_tokens = self.num_confirmed_tokens = num_tokens

    def park(self) -> None:
        """Leave the running set and keep the blocks. No step of it is in flight."""
        self.status = RequestStatus.PARKED
        self.epoch += 1

    def preempt(self) -> None:
        """Leave the running set; steps in flight no longer count."""
        self.status = RequestStatus.PREEMPTED
        self.note(num_preemptions=self.facts.num_preemptions + 1)
        self._leave()

    def finish(self) -> None:
        """Leave for good."""
        self.status = RequestStatus.FINISHED
        self._leave()

    def _leave(self) -> None:
        self.epoch += 1
        self.hold(0)
        self.num_placeholders = 0
        self.num_drafts = 0
        self.drafts.clear()

    def append(self, token_id: int) -> tuple[FinishReason, int | str | None] | None:
        """Add a sampled token; the reason, and the stop token or what else stopped it, if it ends the request."""
        self.token_ids.append(token_id)
        params = self.sampling_params
        repeats = self._repetition.feed(token_id)
        may_stop = self.num_output_tokens >= params.min_tokens
        if token_id in self._eos_token_ids and not params.ignore_eos and (may_stop or self.source.output.grammar):
            return FinishReason.STOP, None  # where min_tokens excludes it, only the end of a grammar can have chosen it
        if may_stop and token_id in self._stop_token_ids:
            return FinishReason.STOP, token_id
        if len(self.token_ids) >= self.limit:
            return FinishReason.LENGTH, None
        return (FinishReason.REPETITION, REPEATED) if may_stop and repeats else None

    def append_sampled(
        self, result: ModelRunnerOutput, prompt_logprobs: list[TokenLogprobs] | None = None
    ) -> EngineCoreOutput:
        """Append what ``result`` sampled under this request's id, up to the token that ends it; the message of it."""
        sampled = result.sampled_token_ids[self.request_id]
        end, count = self.append(sampled[0]), 1
        while end is None and count < len(sampled):
            end = self.append(sampled[count])
            count += 1
        logprobs = result.logprobs.get(self.request_id)
        return self.output(
            sampled[:count],
            logprobs=logprobs[:count] if logprobs is not None else None,
            prompt_logprobs=prompt_logprobs or None,
            finish_reason=end[0] if end else None,
            stop_reason=end[1] if end else None,
        )

    def new_prompt_logprobs(self, result: ModelRunnerOutput, start: int) -> list[TokenLogprobs] | None:
        """Those of ``result``, of a step that began at position ``start``, that were not sent before a preemption."""
        logprobs = result.prompt_logprobs.get(self.request_id)
        if logprobs is None:
            return None
        told = self.next_scored_position - max(start, self.sampling_params.prompt_logprob_start)
        new = logprobs[max(told, 0) :]
        self.num_prompt_logprobs += len(new)
        return new

    def output(
        self,
        new_token_ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: RequestFault | None = None,
    ) -> EngineCoreOutput:
        """The message to the front end; it tells the facts, unless they are the ones told last."""
        facts = None if self.facts is self._told_facts else self.facts
        self._told_facts = self.facts
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            new_logprobs=logprobs,
            new_prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=error,
            facts=facts,
        )
