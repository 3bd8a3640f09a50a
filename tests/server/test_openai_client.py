"""OpenAI's official client against the real server and the real model: what its users call first."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.server.running_server import RunningServer

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: dict[str, Any] = {"model": "smollm2", "temperature": 0}


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_a_response_and_its_stream_are_what_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=FRANCE, max_tokens=20, **ASKED)
    response = client.responses.create(input="What is the capital of France?", max_output_tokens=20, **ASKED)
    assert response.output_text == chat.choices[0].message.content
    assert "Paris" in response.output_text
    assert response.status == "completed"
    with client.responses.stream(input=FRANCE, max_output_tokens=20, **ASKED) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert told == final.output_text == response.output_text
    assert response.usage is not None
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    # asked a second time the prompt comes out of the cache, and the usage says so
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_a_conversation_goes_on_from_its_own_output(client: openai.OpenAI) -> None:
    first = client.responses.create(input=FRANCE, max_output_tokens=20, **ASKED)
    items: Any = [*FRANCE, *first.output, {"role": "user", "content": "Say that again."}]
    second = client.responses.create(input=items, max_output_tokens=20, **ASKED)
    turns: Any = [*FRANCE, {"role": "assistant", "content": first.output_text}, items[-1]]
    chat = client.chat.completions.create(messages=turns, max_tokens=20, **ASKED)
    assert second.output_text == chat.choices[0].message.content


def test_a_response_that_was_cut_says_so(client: openai.OpenAI) -> None:
    response = client.responses.create(input=FRANCE, max_output_tokens=2, **ASKED)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_the_request_id_is_the_servers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=FRANCE, max_tokens=1, **ASKED, extra_headers={"X-Request-Id": "mine"}
    )
    assert (answer._request_id, answer.id) == ("mine", "chatcmpl-mine")
    assert answer.system_fingerprint is not None


def test_times_and_continuous_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="One,", max_tokens=4, **ASKED, extra_body={"return_metrics": True})
    times = answer.metrics  # type: ignore[attr-defined]
    assert set(times) == {
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
    }
    assert all(value >= 0 for value in times.values())
    chunks = client.completions.create(
        prompt="One,",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        **ASKED,
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve("smollm2") == model
    assert (model.id, model.max_model_len) == ("smollm2", 512)  # type: ignore[attr-defined]


def test_errors_have_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="other", input="x")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="not stored") as refused:
        client.responses.create(input="x", previous_response_id="resp_1", **ASKED)
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="512"):
        client.responses.create(input="word " * 600, **ASKED)


def test_a_running_stream_is_aborted_by_its_id(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        messages=FRANCE, max_tokens=400, stream=True, **ASKED, extra_body={"ignore_eos": True}
    )
    first = next(stream)
    aborted = client.delete(f"/requests/{first.id}", cast_to=dict[str, Any])
    assert aborted == {"id": first.id, "object": "request.aborted", "aborted": 1}
    *_, last = stream
    assert last.choices[0].finish_reason == "abort"  # type: ignore[comparison-overlap]


def test_a_response_is_aborted_too(client: openai.OpenAI) -> None:
    done: list[Any] = []

    def run() -> None:
        asked = {**ASKED, "extra_body": {"ignore_eos": True, "request_id": "long"}}
        done.append(client.responses.create(input=FRANCE, max_output_tokens=400, **asked))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        try:
            client.delete("/requests/resp_long", cast_to=dict[str, Any])
        except openai.NotFoundError:
            continue
        break
    thread.join()
    assert done[0].status == "cancelled"


class City(pydantic.BaseModel):
    """What :func:`test_a_pydantic_model_is_parsed` wants to know."""

    name: Annotated[str, pydantic.Field(max_length=12)]
    population: Annotated[int, pydantic.Field(ge=0, le=99_999_999)]
    kind: Literal["capital", "other"]
    note: Annotated[str, pydantic.Field(max_length=8)] | None


def test_a_pydantic_model_is_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": FRANCE, "response_format": City, **ASKED, "max_tokens": 200}
    answer = client.chat.completions.parse(**asked).choices[0].message.parsed
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(answer, City)
    assert streamed == answer
    response = client.responses.parse(
        model="smollm2", input=FRANCE, text_format=City, temperature=0, max_output_tokens=200
    )
    assert response.output_parsed == answer


def test_a_schema_that_cannot_be_enforced_is_the_clients_bad_request(client: openai.OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(messages=FRANCE, response_format=form, max_tokens=8, **ASKED)
    assert caught.value.param == "response_format"
