"""ModelRunner: one step, from a plan to sampled tokens.

    move blocks -> apply the plan to the request states -> copy blocks -> for each pass: run the program once, sample
    -> draft what may come next

The runner keeps sampled tokens itself, so the scheduler may send the next plan before it has seen the result of the
last one. Knows nothing of policies, blocks' owners, text, or which kernels run the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.backends.base import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    BitArray,
    FloatArray,
    Limits,
    Runnable,
    SampledRows,
    SampleRows,
    StepOutputs,
)
from octavo.backends.sampling import masked
from octavo.config import LogprobsMode
from octavo.exceptions import RequestError, ValidationError
from octavo.kv_transfer.movers import Movers
from octavo.messages import CachedRequestData, ModelRunnerOutput, RequestFault, SchedulerOutput, TokenLogprobs
from octavo.structured_output.bank import GrammarBank
from octavo.worker.block_tables import BlockTables
from octavo.worker.input_batch import Chunks, InputBatch, PromptSpan, build_input_batch, split_passes
from octavo.worker.request_states import RequestStates
from octavo.worker.sample.constraints import Constraints
from octavo.worker.siblings import sibling_rows
from octavo.worker.spec_decode.drafter import Drafter, NullDrafter

PREPARING = "preparing its input"
NO_TOKEN: dict[int, RequestError | ValidationError] = {
    NOT_FINITE: RequestError("the model returned NaN or infinite logits"),
    NOTHING_ALLOWED: ValidationError(
        "no token is left: the request excludes all that the grammar of structured_outputs allows",
        parameter="structured_outputs",
    ),
}


class Drawn(NamedTuple):
    """What the sampler made of one pass: result i belongs to ``rows[i]``."""

    outputs: StepOutputs
    adjusted: FloatArray | None
    masks: BitArray | None
    sampled: SampledRows
    rows: SampleRows


class ModelRunner:
    """Runs plans in the order they come. Not thread-safe."""

    def __init__(
        self,
        runnable: Runnable,
        limits: Limits,
        *,
        vocab_size: int,
        max_model_len: int,
        num_kv_groups: int = 1,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        grammars: GrammarBank | None = None,
        drafter: Drafter | None = None,
        max_sampled: int | None = None,
    ) -> None:
        """``max_sampled``: most tokens that a step samples; None: one for each of ``limits.max_seqs``."""
        self._runnable = runnable
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._adjusted = np.empty(
            (0, vocab_size), np.float32
        )  # rows for processors to change; kept, for new pages cost
        self._drafter: Drafter = drafter or NullDrafter()
        self._max_prompt_rows = limits.max_rows - (max_sampled or limits.max_seqs)
        self._states = RequestStates(limits.max_seqs, max_model_len, vocab_size)
        self._constraints = Constraints(grammars)
        self._tables = BlockTables(limits.max_seqs, limits.max_blocks_per_seq, limits.block_size, num_kv_groups)
        # Requests that failed here and that the scheduler has not yet told us to forget: plans in flight may still
        # name them. They are left out of the batch and their error is told again.
        self._failed: dict[str, RequestFault] = {}
        self._movers = Movers({})

    def set_movers(self, movers: Movers) -> None:
        """The tiers that plans move blocks to and from; without a call there are none."""
        self._movers = movers

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. A request that fails alone gets an entry in ``errors``.

        An exception means that the kernels failed, and with them every request of the plan; once those are named in
        ``finished_request_ids``, the runner goes on as before.
        """
        output = ModelRunnerOutput(step_id=plan.step_id, kv_tiers=self._movers.run(plan.kv_moves))
        ids, chunks = self._apply(plan)
        if plan.block_copies:
            self._runnable.copy_blocks(plan.block_copies)
        if ids:
            id_of_row = dict(zip(chunks.rows.tolist(), ids))
            for part in split_passes(self._states, chunks, self._max_prompt_rows):
                batch = build_input_batch(self._states, self._tables, part)
                outputs = self._runnable.run(batch.inputs)
                self._collect(batch, outputs, id_of_row, output)
                self._verify(plan.draft_token_ids, batch, outputs, id_of_row, output)
        for name in output.sampled_token_ids:  # what failed behind a draft fails again, as the first token of a step
            self._failed.pop(name, None)
        output.draft_token_ids.update(self._draft(output))
        output.errors.update({name: self._failed[name] for name in plan.num_scheduled_tokens if name in self._failed})
        return output

    def _apply(self, plan: SchedulerOutput) -> tuple[list[str], Chunks]:
        """Bring the states up to date; the requests to compute and their chunks, in the plan's order."""
        for request_id in plan.finished_request_ids:
            self._states.remove(request_id)
            self._constraints.remove(request_id)
            self._failed.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in plan.new_requests:
            computed[new.request_id] = new.num_computed_tokens
            try:
                row = self._states.add(new)
                self._tables.assign(row, new.block_ids)
                self._constraints.add(new)
            except Exception as error:
                self._failed[new.request_id] = RequestFault.of(error, PREPARING)
        for cached in plan.cached_requests:
            computed[cached.request_id] = cached.num_computed_tokens
            draft = plan.draft_token_ids.get(cached.request_id, ())
            if (cached.new_block_ids or draft) and cached.request_id not in self._failed:
                self._extend(cached, draft)
        return self._chunks(plan, computed)

    def _extend(self, cached: CachedRequestData, draft: Sequence[int]) -> None:
        try:
            row = self._states.row_of[cached.request_id]
            self._tables.append(row, cached.new_block_ids, cached.num_replaced)
            self._states.place_drafts(row, draft)
        except Exception as error:
            self._failed[cached.request_id] = RequestFault.of(error, PREPARING)

    def _chunks(self, plan: SchedulerOutput, computed: dict[str, int]) -> tuple[list[str], Chunks]:
        """The chunk of every scheduled request that has not failed, checked against what is known of it."""
        scheduled, drafts = plan.num_scheduled_tokens, plan.draft_token_ids
        for request_id in scheduled:
            if request_id not in self._failed and not (request_id in computed and request_id in self._states.row_of):
                self._failed[request_id] = RequestFault(f"internal error while {PREPARING}", "the worker lacks it")
        ids = [request_id for request_id in scheduled if request_id not in self._failed]
        rows = np.array([self._states.row_of[i] for i in ids], np.int64)
        starts = np.array([computed[i] for i in ids], np.int64)
        counts = np.array([scheduled[i] for i in ids], np.int64)
        num_drafts = np.array([len(drafts.get(i, ())) for i in ids], np.int64)
        chunks = Chunks(rows, starts, counts, num_drafts)
        known, room = self._states.num_tokens[rows] + num_drafts, self._tables.num_tokens(rows)
        ok = (starts >= 0) & (counts > num_drafts) & (chunks.ends <= np.minimum(known, room))
        if not ok.all():
            for i in np.flatnonzero(~ok):
                cause = (
                    f"scheduled {counts[i]} tokens from {starts[i]} on, with {known[i]} known and room for {room[i]}"
                )
                self._failed[ids[i]] = RequestFault(f"internal error while {PREPARING}", cause)
            ids = [ids[i] for i in np.flatnonzero(ok)]
            chunks = chunks.part(ok)
        return ids, chunks

    def _collect(
        self, batch: InputBatch, outputs: StepOutputs, id_of_row: dict[int, str], output: ModelRunnerOutput
    ) -> None:
        """Sample every finished chunk and take prompt logprobs; what raises is that request's error."""
        if batch.inputs.logit_rows.size == 0:
            return
        states = self._states
        rows = states.sample_rows[batch.sampled_rows]
        rows["logit_row"] = batch.sampled_logits
        rows["position"] = states.num_tokens[batch.sampled_rows]
        adjusted = None
        if states.has_processors[batch.sampled_rows].any():
            adjusted = self._adjust(batch, outputs, rows, id_of_row, output)
        masks = None
        if self._constraints:
            ids = [id_of_row[row] for row in batch.sampled_rows.tolist()]
            masks = self._constraints.masks(ids, rows, lambda name, error: self._fail(name, error, output))
        num_sampled = rows.size
        siblings = sibling_rows(states, batch.sampled_rows, rows)
        if batch.prompt_spans or siblings.ids:
            rows = np.concatenate([rows, *(self._prompt_rows(span) for span in batch.prompt_spans), siblings.rows])
        sampled = outputs.sample(rows, adjusted, masks)
        first = num_sampled
        for span in batch.prompt_spans:
            self._take_prompt_logprobs(span, outputs, sampled, rows, first, id_of_row[span.row], output)
            first += span.count
        drawn = Drawn(outputs, adjusted, masks, sampled, rows)
        self._take_tokens(batch.sampled_rows, drawn, id_of_row, output)
        for i, (sibling_id, leader) in enumerate(siblings.ids, first):
            if id_of_row[leader] not in self._failed:
                self._report(sibling_id, leader, i, drawn, output)

    def _verify(
        self,
        drafts: Mapping[str, Sequence[int]],
        batch: InputBatch,
        outputs: StepOutputs,
        id_of_row: dict[int, str],
        output: ModelRunnerOutput,
    ) -> None:
        """Sample behind each draft that is the token just sampled, one position of every such request at a time.

        That token is known by now, so the next one is drawn as any first one of a step: nothing depends on drafts.
        """
        for count in itertools.count(1):
            sampled = output.sampled_token_ids
            longer = {name: ids for name, ids in drafts.items() if len(ids) >= count}
            right = {self._states.row_of[name] for name, ids in longer.items() if ids[:count] == sampled.get(name)}
            places = [i for i, row in enumerate(batch.sampled_rows.tolist()) if row in right] if right else []
            if not places:
                return
            rows, first = batch.sampled_rows[places], batch.sampled_logits[places]
            self._collect(InputBatch(batch.inputs, rows, first + count, []), outputs, id_of_row, output)

    def _draft(self, output: ModelRunnerOutput) -> dict[str, list[int]]:
        """Guesses at what follows the tokens just sampled, as far as the requests' grammars allow them."""
        drafts = self._drafter.propose(self._states, output.sampled_token_ids)
        return {name: allowed for name, ids in drafts.items() if (allowed := self._constraints.allowed(name, ids))}

    def _adjust(
        self,
        batch: InputBatch,
        outputs: StepOutputs,
        rows: SampleRows,
        id_of_row: dict[int, str],
        output: ModelRunnerOutput,
    ) -> FloatArray:
        """Copies of the logits of requests with processors, after these; ``rows`` learn where theirs is."""
        states, wanting = self._states, np.flatnonzero(self._states.has_processors[batch.sampled_rows]).tolist()
        if len(self._adjusted) < len(wanting):
            self._adjusted = np.empty((len(wanting), self._adjusted.shape[1]), np.float32)
        for place, i in enumerate(wanting):
            row, raw = int(batch.sampled_rows[i]), outputs.rows("logits", int(batch.sampled_logits[i]))
            sampler = states.samplers[row]
            if sampler is None or id_of_row[row] in self._failed:
                continue
            try:
                num_prompt_tokens = int(states.num_prompt_tokens[row])
                sampler.adjust(raw, states.tokens(row), num_prompt_tokens, self._adjusted[place])
                rows["adjusted_row"][i] = place
            except Exception as error:
                if np.isfinite(raw).all():  # else the sampler says what is wrong
                    self._fail(id_of_row[row], error, output)
        return self._adjusted

    def _take_tokens(
        self,
        state_rows: npt.NDArray[np.int64],
        drawn: Drawn,
        id_of_row: dict[int, str],
        output: ModelRunnerOutput,
    ) -> None:
        """Keep and report the tokens of ``state_rows``, which are the first ones drawn."""
        token_ids = drawn.sampled.token_ids
        kept = []
        for i, (row, token_id) in enumerate(zip(state_rows.tolist(), token_ids.tolist())):
            request_id = id_of_row[row]
            if request_id in self._failed:
                continue
            try:
                if token_id < 0:
                    raise NO_TOKEN[token_id]
                self._constraints.take(request_id, token_id)
            except Exception as error:
                self._fail(request_id, error, output)
                continue
            kept.append(i)
            self._report(request_id, row, i, drawn, output)
        self._states.append(state_rows[kept], token_ids[kept])

    def _report(self, name: str, row: int, i: int, drawn: Drawn, output: ModelRunnerOutput) -> None:
        """Result ``i``, of the logits of state row ``row``, is the next token of the request ``name``."""
        outputs, adjusted, masks, sampled, rows = drawn
        token_id = int(sampled.token_ids[i])
        output.sampled_token_ids.setdefault(name, []).append(token_id)
        if sampled.logprobs.shape[1] == 0 or (k := int(rows["num_logprobs"][i])) < 0:
            return
        sampler = self._states.samplers[row]
        assert sampler is not None
        if self._is_reported(sampler.logprob_ids):
            entry = _token_logprobs(sampled, i, k)
        else:
            raw, place = outputs.rows("logits", int(rows["logit_row"][i])), int(rows["adjusted_row"][i])
            changed = raw if adjusted is None or place < 0 else adjusted[place]
            if masks is not None and (mask := int(rows["mask_row"][i])) >= 0:
                changed = masked(changed, masks[mask])
            entry = sampler.logprobs(self._logprobs_mode, raw, changed, token_id)
        output.logprobs.setdefault(name, []).append(entry)

    def _is_reported(self, ids: list[int] | None) -> bool:
        """Whether the sampler's own logprobs are what was asked for."""
        return ids is None and self._logprobs_mode == "raw_logprobs"

    def _prompt_rows(self, span: PromptSpan) -> SampleRows:
        """SAMPLE_ROWs that ask for the logprobs of the prompt's own tokens."""
        sampler = self._states.samplers[span.row]
        assert sampler is not None
        rows = np.repeat(sampler.row, span.count)
        rows["num_logprobs"] = sampler.num_prompt_logprobs
        rows["given_token"] = self._states.token_ids[span.row, span.first_position : span.first_position + span.count]
        rows["logit_row"] = span.first_logit + np.arange(span.count)
        return rows

    def _take_prompt_logprobs(
        self,
        span: PromptSpan,
        outputs: StepOutputs,
        sampled: SampledRows,
        rows: SampleRows,
        first: int,
        request_id: str,
        output: ModelRunnerOutput,
    ) -> None:
        """Report the results ``first .. first + span.count - 1``."""
        if request_id in self._failed:
            return
        if (sampled.token_ids[first : first + span.count] < 0).any():
            self._fail(request_id, NO_TOKEN[NOT_FINITE], output)
            return
        sampler, results = self._states.samplers[span.row], range(first, first + span.count)
        assert sampler is not None
        if self._is_reported(sampler.prompt_logprob_ids):
            k = int(rows["num_logprobs"][first])
            entries = [_token_logprobs(sampled, i, k) for i in results]
        else:
            mode = self._logprobs_mode
            entries = [
                sampler.prompt_logprobs(
                    mode, outputs.rows("logits", int(rows["logit_row"][i])), int(rows["given_token"][i])
                )
                for i in results
            ]
        output.prompt_logprobs.setdefault(request_id, []).extend(entries)

    def _fail(self, request_id: str, error: Exception, output: ModelRunnerOutput) -> None:
        self._failed[request_id] = RequestFault.of(error, "sampling")
        output.prompt_logprobs.pop(request_id, None)


def _token_logprobs(sampled: SampledRows, i: int, k: int) -> TokenLogprobs:
    ids, values = sampled.logprob_ids[i, : k + 1].tolist(), sampled.logprobs[i, : k + 1].tolist()
    return TokenLogprobs(ids, values, [int(sampled.ranks[i]), *range(1, k + 1)])
