"""Where the values come from that a request does not bring: override > generation_config.json or GGUF > none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import SamplingConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.entrypoints.sampling_defaults import read_sampling_defaults
from octavo.exceptions import ConfigError, ValidationError
from octavo.messages import RequestOutputKind
from tests.formats.gguf_writer import write_gguf

OPTIONS: dict[str, Any] = {"backend": "reference", "kv_cache_memory": "1MiB", "max_num_seqs": 4}


def folder_with(path: Path, **values: Any) -> str:
    (path / "generation_config.json").write_text(json.dumps(values))
    return str(path)


def test_the_models_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "temperature": 0.25,
        "top_k": 40,
        "max_new_tokens": 99,
        "do_sample": True,
        "eos_token_id": 2,
        "top_p": None,
    }
    model = folder_with(tmp_path, **given, min_p=7, repetition_penalty="much")
    with caplog.at_level(logging.WARNING):
        found = read_sampling_defaults(model, SamplingConfig())
    assert found == {"temperature": 0.25, "top_k": 40, "max_tokens": 99}
    assert "min_p must be in [0, 1], got 7" in caplog.text
    assert read_sampling_defaults(model, SamplingConfig(generation_config="vllm")) == {}
    assert read_sampling_defaults(str(tmp_path / "nothing"), SamplingConfig()) == {}


def test_overrides_come_first(tmp_path: Path) -> None:
    model = folder_with(tmp_path, temperature=0.25, top_k=40)
    override = {"top_k": 7, "max_new_tokens": 5, "presence_penalty": 1}
    config = SamplingConfig(override_generation_config=override)
    expected = {"temperature": 0.25, "top_k": 7, "max_tokens": 5, "presence_penalty": 1}
    assert read_sampling_defaults(model, config) == expected


@pytest.mark.parametrize("override", [{"temprature": 1}, {"temperature": 3}, {"top_k": 0.5}, {"max_tokens": 0}])
def test_wrong_overrides(override: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(override))):
        read_sampling_defaults(str(tmp_path), SamplingConfig(override_generation_config=override))


def test_another_folder(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    model = folder_with(tmp_path, temperature=0.25)
    with pytest.raises(ConfigError, match="other"):
        read_sampling_defaults(model, SamplingConfig(generation_config=str(other)))
    folder_with(other, top_p=0.5)
    assert read_sampling_defaults(model, SamplingConfig(generation_config=str(other))) == {"top_p": 0.5}


def test_a_gguf_files_own(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "general.sampling.temp": 0.5, "general.sampling.penalty_repeat": 1.25}
    path = write_gguf(tmp_path / "m.gguf", metadata | {"general.sampling.top_k": 20, "general.sampling.mirostat": 1})
    expected = {"temperature": 0.5, "repetition_penalty": 1.25, "top_k": 20}
    assert read_sampling_defaults(str(path), SamplingConfig()) == expected
    assert read_sampling_defaults(str(path), SamplingConfig(generation_config="vllm")) == {}


def test_in_python(tiny_model: str) -> None:
    with LLM(tiny_model, **OPTIONS, override_generation_config={"temperature": 0, "max_tokens": 3}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
        (output,) = llm.generate("the quick", use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        (own,) = llm.generate("the quick", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert len(own.outputs[0].token_ids) == 5
        llm.generate(["a", "b"], use_tqdm=False, priority=[1, 0])
        with pytest.raises(ValidationError, match="3 priority for 2 prompts"):
            llm.generate(["a", "b"], use_tqdm=False, priority=[1, 0, 2])
        with pytest.raises(ValidationError, match="embeddings") as caught:
            llm.generate({"prompt_embeds": [[0.5]]}, use_tqdm=False)
        assert caught.value.parameter == "prompt_embeds"
        with pytest.raises(ValidationError, match="colour"):
            llm.generate({"prompt": "x", "colour": "red"}, use_tqdm=False)
        with pytest.raises(TypeError, match="colour"):
            llm.generate("x", colour="red")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="temprature"):
        LLM(tiny_model, **OPTIONS, override_generation_config={"temprature": 0})
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


async def test_the_async_engine_takes_every_form_of_prompt(tiny_async: AsyncLLM) -> None:
    ids = tiny_async.tokenizer.encode("the lazy dog")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    texts = []
    for form in ("the lazy dog", ids, {"prompt": "the lazy dog"}, {"prompt_token_ids": ids, "cache_salt": "s"}):
        (output,) = [output async for output in tiny_async.generate(form, params)]
        assert output.prompt_token_ids == ids
        assert output.prompt == (
            form if isinstance(form, str) else form.get("prompt") if isinstance(form, dict) else None
        )
        texts.append(output.outputs[0].text)
    assert len(set(texts)) == 1
    with pytest.raises(ValidationError, match="audio"):
        tiny_async.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, params)
