"""A01: nothing ends an answer before ``min_tokens``: no stop string, no stop id, none of several EOS ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.cases.asking import answered, ask, events, streamed_text
from tests.engine.tiny_llama import write_model, write_tokenizer
from tests.server.running_server import RunningServer

LINES: dict[str, Any] = {"prompt": "1\n2\n3\n4\n5\n", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
FIRST, SECOND = 17, 23  # the two EOS ids; the tokenizer knows only the first


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("least", [1, 9, 10, 11, 40])
def test_a_stop_string_completed_before_stays_in_the_text(
    live_server: RunningServer, include: bool, least: int
) -> None:
    asked = {**LINES, "stop": ["\n"], "include_stop_str_in_output": include, "min_tokens": least}
    whole = answered(ask(live_server, **asked, return_token_ids=True))["choices"][0]
    free = answered(ask(live_server, **LINES, return_token_ids=True))["choices"][0]
    count = len(whole["token_ids"])
    assert count >= least
    assert whole["token_ids"] == free["token_ids"][:count]
    if count < 40:
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "\n")
        assert whole["text"] == free["text"][: len(whole["text"])]
        assert whole["text"].endswith("\n") or not include
    assert whole["text"].count("\n") >= (1 if least > 9 else 0)
    assert streamed_text(events(live_server, **asked)) == whole["text"]


def test_an_ending_token_is_excluded_not_just_passed_over(live_server: RunningServer) -> None:
    free = answered(ask(live_server, **LINES, return_token_ids=True))["choices"][0]["token_ids"]
    ids = sorted(set(free[:6]))
    asked = {**LINES, "stop_token_ids": ids, "min_tokens": 12, "return_token_ids": True}
    choice = answered(ask(live_server, **asked))["choices"][0]
    assert len(choice["token_ids"]) >= 12
    assert not set(choice["token_ids"][:12]) & set(ids)
    early = answered(ask(live_server, **{**asked, "min_tokens": 0}))["choices"][0]
    assert (early["token_ids"], early["stop_reason"], early["text"]) == (free[:1], free[0], "")


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny model whose generation_config.json has a second EOS id."""
    folder: Path = tmp_path_factory.mktemp("two-ends")
    write_tokenizer(folder)
    write_model(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    settings["eos_token"] = next(token for token, token_id in tokens.items() if token_id == FIRST)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [FIRST, SECOND]}))
    with LLM(str(folder), backend="reference", kv_cache_memory="1MiB", max_num_seqs=4) as llm:
        yield llm
    shutil.rmtree(folder)


@pytest.mark.parametrize("wanted", [FIRST, SECOND])
def test_every_eos_id_is_held_back(two_ends: LLM, wanted: int) -> None:
    eager = {"logit_bias": {wanted: 100.0}, "temperature": 0.0, "max_tokens": 30}
    (at_once, later) = two_ends.generate(
        ["x", "x"], [SamplingParams(**eager), SamplingParams(**eager, min_tokens=10)], use_tqdm=False
    )
    assert at_once.outputs[0].token_ids == [wanted]
    ids = later.outputs[0].token_ids
    assert len(ids) == 11  # the first place at which it may end
    assert ids[-1] == wanted
    assert not {FIRST, SECOND} & set(ids[:-1])
    assert (later.outputs[0].finish_reason, later.outputs[0].stop_reason) == ("stop", None)
