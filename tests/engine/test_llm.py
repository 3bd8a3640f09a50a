"""The offline LLM: forms of prompts, order, chat, Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.exceptions import ConfigError, EngineDeadError, ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, backend="reference", kv_cache_memory="1MiB", max_num_seqs=8) as one:
        yield one


def test_prompts_of_every_form(llm: LLM) -> None:
    text = "the lazy dog"
    ids = llm.get_tokenizer().encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt": text, "cache_salt": "s"}]
    outputs = llm.generate(forms, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    assert [output.prompt for output in outputs] == [text, None, text, None, text]
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.finished for output in outputs)
    for single in forms[:4]:
        (output,) = llm.generate(single, GREEDY)
        assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_outputs_keep_the_order_of_prompts(llm: LLM) -> None:
    prompts = [[i + 2] * (1 + 3 * i) for i in range(20)]
    params = [GREEDY.replace(max_tokens=30 - i) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30 - i for i in range(20)]
    for index in (0, 7, 19):  # and each is what it would be alone
        (alone,) = llm.generate([prompts[index]], params[index], use_tqdm=False)
        assert alone.outputs[0].token_ids == outputs[index].outputs[0].token_ids


def test_prompts_in_any_container(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], GREEDY)]
    rows = [np.array([5, 6]), np.array([7])]
    for form in (rows, ([5, 6], [7]), (row for row in rows)):
        assert [output.outputs[0].token_ids for output in llm.generate(form, GREEDY)] == expected  # type: ignore[arg-type]
    (output,) = llm.generate(np.array([5, 6]), GREEDY)  # type: ignore[arg-type]
    assert output.outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("prompts", [None, 5, [None], b"abc", ["ok", None]])
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("params", ["x", {"temperature": 0}, [3]])
def test_what_is_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        llm.generate(["the"], params)
    assert caught.value.parameter == "sampling_params"


@pytest.mark.parametrize("messages", [[], [[]], "hi", ["hi"], [[{"role": "user", "content": "x"}], []]])
def test_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.parameter == "messages"


def test_threads_take_turns(llm: LLM) -> None:
    """Two callers stepping one engine would take each other's tokens."""
    prompts = [[[i + 2] * 5, [i + 3] * 9] for i in range(6)]
    expected = [[o.outputs[0].token_ids for o in llm.generate(p, GREEDY)] for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(lambda p: llm.generate(p, GREEDY), prompts))
    assert [[o.outputs[0].token_ids for o in found] for found in outputs] == expected


def test_the_prefix_cache_can_be_reset(llm: LLM) -> None:
    prompt = [list(range(100, 140))]
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_default_params_are_the_documented_ones(llm: LLM) -> None:
    (output,) = llm.generate("the")
    assert len(output.outputs[0].token_ids) <= 16


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "one small step"}]
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt == "user: one small step\nassistant:"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    several = llm.chat([conversation, conversation], GREEDY)
    assert [one.outputs[0].text for one in several] == [output.outputs[0].text] * 2
    with pytest.raises(ValidationError):
        llm.chat([], GREEDY)


def test_chat_reads_messages_as_the_server_does(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "step"}]
    (output,) = llm.chat([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], GREEDY)
    assert output.prompt == "system: Be brief.\nuser: one\nstep\nassistant:"
    for messages, more, parameter in (
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "messages"),
        ([{"role": "user", "content": ["text"]}], {}, "messages"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "continue_final_message"),
        ([{"role": "user", "content": "x"}], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ):
        with pytest.raises(ValidationError) as caught:
            llm.chat(messages, GREEDY, **more)
        assert caught.value.parameter == parameter
    with pytest.raises(ValidationError, match="no attribute 'role'"):
        llm.chat([{"content": "x"}], GREEDY, chat_template="{{ 'a ' + messages[0].role }}")


def test_one_bad_prompt_refuses_the_batch_and_leaves_the_engine_usable(llm: LLM) -> None:
    with pytest.raises(ValidationError) as caught:
        llm.generate([[1, 2], [10**6]], GREEDY)
    assert caught.value.parameter == "prompt"
    with pytest.raises(ValidationError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(ValidationError, match="prompt_ids"):
        llm.generate({"prompt_ids": [1]}, GREEDY)
    assert len(llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids) == 12


@pytest.fixture
def sigint_handled() -> Iterator[None]:
    """Python's own handler, also where the tests were started with SIGINT ignored (a background job of a shell)."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("sigint_handled")
def test_ctrl_c_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = llm.generate([[3, 4]], GREEDY)
    engine = llm._live_engine()
    real, steps = engine.step, []

    def step() -> list[object]:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return real()  # type: ignore[return-value]

    monkeypatch.setattr(engine, "step", step)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4]] * 20, GREEDY.replace(max_tokens=100))
    assert len(steps) == 3
    assert signal.getsignal(signal.SIGINT) is before
    engine.check_invariants()
    monkeypatch.undo()
    (again,) = llm.generate([[3, 4]], GREEDY)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_after_shutdown(tiny_model: str) -> None:
    one = LLM(tiny_model, backend="reference", kv_cache_memory="1MiB")
    one.shutdown()
    one.shutdown()
    with pytest.raises(EngineDeadError):
        one.generate("a")


def test_unknown_arguments_are_refused(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="max_model_length"):
        LLM(tiny_model, max_model_length=5)
