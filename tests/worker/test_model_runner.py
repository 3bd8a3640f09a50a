"""ModelRunner on a real (tiny) model: the answer to a request does not depend on how its steps are cut or shared."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import FloatArray, Runnable, StepInputs
from octavo.backends.sampling import ArrayOutputs
from octavo.messages import (
    CachedRequestData,
    OutputOptions,
    RequestFault,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.worker.model_runner import NO_TOKEN
from tests.worker.tiny_model import (
    MAX_LEN,
    VOCAB,
    Driver,
    all_blocks,
    make_runner,
    new_request,
    random_weights,
)

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (5, 17, 33, 1, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=0.9, seed=3, max_tokens=8, logprobs=3),
    SamplingParams(temperature=1.3, seed=4, top_k=20, top_p=0.9, max_tokens=8, prompt_logprobs=2),
    SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=8, logprobs=0),
    SamplingParams(temperature=0.0, presence_penalty=1.0, min_tokens=8, max_tokens=8, prompt_logprobs=0, logprobs=2),
]
OUTPUT = 8
ENDS_AT_2 = OutputOptions(eos_token_ids=[2])


def result_of(driver: Driver, request_id: str) -> tuple[list[int], list[object], list[object]]:
    return driver.tokens(request_id), driver.logprobs(request_id), driver.prompt_logprobs(request_id)


def run_alone(index: int, chunk: int = MAX_LEN, **runner: int) -> tuple[list[int], list[object], list[object]]:
    driver = Driver(make_runner(**runner))
    left = len(PROMPTS[index])
    new = [new_request("r", PROMPTS[index], PARAMS[index], block_ids=all_blocks(0), output=ENDS_AT_2)]
    while left:
        take = min(chunk, left)
        driver.step({"r": take}, new)
        new, left = [], left - take
    for _ in range(OUTPUT - 1):
        driver.step({"r": 1})
    return result_of(driver, "r")


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], list[object], list[object]]]:
    return [run_alone(index) for index in range(len(PROMPTS))]


def test_alone_gives_whole_results(alone):
    for prompt, params, (tokens, logprobs, prompt_logprobs) in zip(PROMPTS, PARAMS, alone):
        assert len(tokens) == OUTPUT
        assert len(logprobs) == (OUTPUT if params.logprobs is not None else 0)
        assert len(prompt_logprobs) == (len(prompt) - 1 if params.prompt_logprobs is not None else 0)
        for entry, token in zip(logprobs, tokens):
            assert entry.token_ids[0] == token
        for entry, token in zip(prompt_logprobs, prompt[1:]):
            assert entry.token_ids[0] == token
    assert len({tuple(tokens) for tokens, _, _ in alone}) == len(alone), "the model answers all prompts alike"


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_equals_whole(alone, chunk):
    for index in range(len(PROMPTS)):
        assert run_alone(index, chunk) == alone[index]


@pytest.mark.parametrize("prompt_rows", [1, 5, 16])
def test_passes_for_prompt_logprobs_change_nothing(alone, prompt_rows):
    for index in (2, 4):
        assert run_alone(index, prompt_rows=prompt_rows) == alone[index]


@pytest.mark.parametrize("prompt_rows", [3, 128])
def test_batch_equals_alone_with_chunks_and_late_arrivals(alone, prompt_rows):
    driver = Driver(make_runner(prompt_rows=prompt_rows))
    left = [len(prompt) for prompt in PROMPTS]
    made = [0] * len(PROMPTS)
    step = 0
    while min(made) < OUTPUT:
        scheduled, new = {}, []
        for i, prompt in enumerate(PROMPTS):
            if step < 2 * i or made[i] == OUTPUT:
                continue
            take = min(left[i], 9) or 1
            scheduled[f"r{i}"] = take
            if left[i] == len(prompt):
                new.append(new_request(f"r{i}", prompt, PARAMS[i], block_ids=all_blocks(i), output=ENDS_AT_2))
            left[i] = max(left[i] - take, 0)
            made[i] += left[i] == 0
        driver.step(scheduled, new)
        step += 1
    assert [result_of(driver, f"r{i}") for i in range(len(PROMPTS))] == alone


def test_preempted_and_resubmitted_equals_uninterrupted(alone):
    for index, prompt in enumerate(PROMPTS):
        driver = Driver(make_runner())
        driver.step(
            {"r": len(prompt)},
            [new_request("r", prompt, PARAMS[index], block_ids=all_blocks(0), output=ENDS_AT_2)],
        )
        driver.step({"r": 1})
        driver.step({"r": 1})
        so_far = driver.tokens("r")
        assert len(so_far) == 3
        again = new_request(
            "r",
            prompt + so_far,
            PARAMS[index],
            num_prompt_tokens=len(prompt),
            block_ids=all_blocks(5),
            output=ENDS_AT_2,
        )
        # A recomputation in two chunks, forgotten and added in one plan, on other blocks.
        driver.step({"r": len(prompt)}, [again], finished_request_ids=["r"])
        driver.step({"r": 3})
        for _ in range(OUTPUT - 4):
            driver.step({"r": 1})
        tokens, logprobs, _ = result_of(driver, "r")
        assert (tokens, logprobs) == alone[index][:2]


def test_prefix_from_cached_blocks_equals_computed(alone):
    driver = Driver(make_runner())
    prompt, params = PROMPTS[4], SamplingParams(temperature=0.0, presence_penalty=1.0, min_tokens=8, logprobs=2)
    driver.step(
        {"first": len(prompt)}, [new_request("first", prompt, params, block_ids=all_blocks(0), output=ENDS_AT_2)]
    )
    shared = all_blocks(0)[:2] + all_blocks(1)[2:]
    driver.step(
        {"r": len(prompt) - 32},
        [new_request("r", prompt, params, num_computed_tokens=32, block_ids=shared, output=ENDS_AT_2)],
    )
    for _ in range(OUTPUT - 1):
        driver.step({"r": 1})
    assert result_of(driver, "r")[:2] == alone[4][:2]


def test_block_copy_runs_before_the_forward(alone):
    """A fork: the child continues from copies of its parent's blocks, which the parent then overwrites."""
    driver = Driver(make_runner())
    prompt, params = PROMPTS[1], PARAMS[1]
    driver.step({"p": len(prompt) - 1}, [new_request("p", prompt, params, block_ids=all_blocks(0))])
    child = new_request("c", prompt, params, num_computed_tokens=len(prompt) - 1, block_ids=all_blocks(1))
    other = new_request("o", PROMPTS[2], params, block_ids=all_blocks(0))
    copies = list(zip(all_blocks(0), all_blocks(1)))
    driver.step({"c": 1, "o": 20}, [child, other], block_copies=copies, finished_request_ids=["p"])
    for _ in range(OUTPUT - 1):
        driver.step({"c": 1})
    assert result_of(driver, "c")[:2] == alone[1][:2]


def test_block_ids_may_come_step_by_step(alone):
    runner = make_runner()
    prompt, blocks = PROMPTS[2], all_blocks(3)
    output = runner.execute(
        SchedulerOutput(
            step_id=0,
            num_scheduled_tokens={"r": 16},
            new_requests=[new_request("r", prompt, PARAMS[2], block_ids=blocks[:1])],
        )
    )
    assert output.sampled_token_ids == {}
    tokens, computed = [], 16
    for step, (count, new_blocks) in enumerate([(16, blocks[1:2]), (1, blocks[2:])] + [(1, [])] * (OUTPUT - 1)):
        cached = CachedRequestData(request_id="r", num_computed_tokens=computed, new_block_ids=new_blocks)
        plan = SchedulerOutput(step_id=step + 1, num_scheduled_tokens={"r": count}, cached_requests=[cached])
        output = runner.execute(plan)
        assert output.step_id == step + 1
        computed += count
        tokens += output.sampled_token_ids.get("r", [])
    assert tokens == alone[2][0]


def test_a_row_full_to_max_model_len_still_answers():
    driver = Driver(make_runner())
    prompt = PROMPTS[0] * (MAX_LEN // len(PROMPTS[0]) + 1)
    prompt = prompt[:MAX_LEN]
    out = driver.step({"r": MAX_LEN}, [new_request("r", prompt, PARAMS[0], block_ids=all_blocks(0))])
    assert len(out.sampled_token_ids["r"]) == 1
    out = driver.step({"r": 1})  # a plan in flight when the request ended
    assert "with 64 known" in out.errors["r"].cause


class Poisoned:
    """The real runnable, with the logits of chosen calls overwritten: what a numerically broken model does."""

    def __init__(self, runnable: Runnable, poison: dict[int, tuple[int, float]]) -> None:
        self.runnable, self.poison, self.calls = runnable, poison, 0

    def run(self, inputs: StepInputs) -> ArrayOutputs:
        logits = self.runnable.run(inputs).rows("logits")
        if self.calls in self.poison:
            row, value = self.poison[self.calls]
            logits[row, 5] = value
        self.calls += 1
        return ArrayOutputs({"logits": logits})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_logits_fail_one_request_alone(alone, value):
    runner = make_runner()
    runner._runnable = Poisoned(runner._runnable, {2: (1, value)})
    driver = Driver(runner)
    new = [new_request(f"r{i}", PROMPTS[i], PARAMS[i], block_ids=all_blocks(i), output=ENDS_AT_2) for i in (0, 1, 3)]
    driver.step({f"r{i}": len(PROMPTS[i]) for i in (0, 1, 3)}, new)
    everyone = {"r0": 1, "r1": 1, "r3": 1}
    driver.step(everyone)
    out = driver.step(everyone)
    assert out.errors == {"r1": RequestFault(str(NO_TOKEN[-1]))}
    assert set(out.sampled_token_ids) == {"r0", "r3"}
    # The plan that was in flight still names it: the error again, and no harm to the others.
    out = driver.step(everyone)
    assert out.errors == {"r1": RequestFault(str(NO_TOKEN[-1]))}
    out = driver.step({"r0": 1, "r3": 1}, finished_request_ids=["r1"])
    assert out.errors == {}
    for _ in range(OUTPUT - 5):
        driver.step({"r0": 1, "r3": 1})
    assert [result_of(driver, f"r{i}") for i in (0, 3)] == [alone[0], alone[3]]
    # Its row is free again and its id usable.
    out = driver.step({"r1": len(PROMPTS[1])}, [new_request("r1", PROMPTS[1], PARAMS[1], block_ids=all_blocks(1))])
    assert out.sampled_token_ids["r1"] == alone[1][0][:1]


@pytest.mark.parametrize(("prompt_rows", "call"), [(128, 0), (9, 0), (9, 2)])
def test_bad_prompt_logits_fail_without_partial_logprobs(prompt_rows, call):
    runner = make_runner(prompt_rows=prompt_rows)
    runner._runnable = Poisoned(runner._runnable, {call: (3, np.nan)})
    out = Driver(runner).step(
        {"r": len(PROMPTS[4])}, [new_request("r", PROMPTS[4], PARAMS[4], block_ids=all_blocks(0))]
    )
    assert out.errors == {"r": RequestFault(str(NO_TOKEN[-1]))}
    assert out.prompt_logprobs == {}
    assert out.sampled_token_ids == {}


def test_a_nan_weight_row_reaches_only_requests_that_read_it():
    """The poison comes from the model itself: the embedding of token 9 is NaN."""
    arrays = random_weights()
    arrays["embed_tokens"][9] = np.nan
    driver = Driver(make_runner(arrays=arrays))
    good, bad = [t for t in PROMPTS[2] if t != 9], [1, 9, 4]
    params = SamplingParams(temperature=0.0)
    out = driver.step(
        {"good": len(good), "bad": 3},
        [
            new_request("good", good, params, block_ids=all_blocks(0)),
            new_request("bad", bad, params, block_ids=all_blocks(1)),
        ],
    )
    assert out.errors == {"bad": RequestFault(str(NO_TOKEN[-1]))}
    assert list(out.sampled_token_ids) == ["good"]


def test_sampling_exceptions_fail_one_request_alone():
    driver = Driver(make_runner())
    masked = SamplingParams(temperature=0.0, allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)
    broken = SamplingParams(temperature=0.0, logit_bias={VOCAB: 1.0})
    fine = SamplingParams(temperature=0.0)
    out = driver.step(
        {"masked": 2, "broken": 2, "fine": 2},
        [
            new_request("masked", [1, 2], masked, block_ids=all_blocks(0)),
            new_request("broken", [1, 2], broken, block_ids=all_blocks(1)),
            new_request("fine", [1, 2], fine, block_ids=all_blocks(2)),
        ],
    )
    assert set(out.errors) == {"masked", "broken"}
    assert "no token is left" in out.errors["masked"].message
    assert list(out.sampled_token_ids) == ["fine"]


def test_requests_that_cannot_be_added_fail_alone():
    driver = Driver(make_runner(max_seqs=3))
    params = SamplingParams(temperature=0.0)
    new = [
        new_request("fine", [1, 2], params, block_ids=[1]),
        new_request("outside", [1, VOCAB], params, block_ids=[2]),
        new_request("long", [1] * (MAX_LEN + 1), params, block_ids=[3]),
        new_request("table", [1, 2], params, block_ids=list(range(4, 9))),
        new_request("noroom", [1] * 17, params, block_ids=[9]),
        new_request("fourth", [1, 2], params, block_ids=[10]),
    ]
    out = driver.step({"fine": 2, "outside": 2, "long": 65, "table": 2, "noroom": 17, "fourth": 2}, new)
    assert list(out.sampled_token_ids) == ["fine"]
    assert set(out.errors) == {"outside", "long", "table", "noroom", "fourth"}
    assert "rows of the worker are taken" in out.errors["fourth"].message
    out = driver.step({"fourth": 2}, [new[-1]], finished_request_ids=["outside", "long", "table", "noroom", "fourth"])
    assert list(out.sampled_token_ids) == ["fourth"]


def test_prompt_logprobs_are_the_models_own():
    """Against log-softmax of the logits of the whole prompt in one pass."""
    runner = make_runner()
    seen: list[FloatArray] = []

    class Recorder(Poisoned):
        def run(self, inputs: StepInputs) -> ArrayOutputs:
            outputs = super().run(inputs)
            seen.append(outputs.rows("logits").copy())
            return outputs

    runner._runnable = Recorder(runner._runnable, {})
    out = Driver(runner).step(
        {"r": len(PROMPTS[2])}, [new_request("r", PROMPTS[2], PARAMS[2], block_ids=all_blocks(0))]
    )
    logits = seen[0].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entries: list[TokenLogprobs] = out.prompt_logprobs["r"]
    assert len(entries) == len(PROMPTS[2]) - 1
    for i, entry in enumerate(entries):
        np.testing.assert_allclose(entry.logprobs, expected[i][entry.token_ids], atol=1e-5)
        assert entry.token_ids[1:] == np.argsort(-expected[i])[:2].tolist()
