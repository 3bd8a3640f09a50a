"""The requests of the OpenAI API that several routes share, field by field, with vLLM's additions.

Types and shapes are checked here; ranges in SamplingParams; what the model decides in ``chat.prompts``. A field whose
feature octavo does not have is in one of the REFUSED tables: it is accepted with the values that change nothing and
refused with every other, so that no client believes it got what it asked for. Unknown fields are ignored, but named in
a header of the answer (``http.routing.note_ignored``).

A field that a client can make very long is refused at its first fault and above a bound: Pydantic would else describe
every wrong element, millions of errors and half a minute of the event loop for one body.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from octavo.entrypoints.http.field_errors import shown
from octavo.exceptions import ValidationError

MAX_IDS = 256 * 1024  # token ids in one list, prompts aside; entries of logit_bias
MAX_STOP_IDS = 4096  # each sample of a request keeps a set of them
MAX_STOP = 128  # each is looked for after every token
MAX_STOP_CHARS = 4096  # of one; as much is held back of every answer
MAX_WORD_CHARS = 1024  # of a bad word, which is tokenised in several spellings
MAX_WORDS = 64 * 1024  # bad_words, whose real limit is the server's
MAX_MESSAGES = 16 * 1024
MAX_PARTS = 1024  # content parts of one message
MAX_PROMPTS = 1024  # prompts of one completions request
MAX_METADATA = 16  # OpenAI's
MAX_TOOLS = 1024
MAX_CALLS = 1024  # of one message in the history
MAX_ARGUMENTS = 1024 * 1024  # characters of one call's arguments, which are JSON once more

T = TypeVar("T")


def _check_prompt(value: Any) -> Any:
    """``value`` if it is a text, a list of texts, a list of token ids, or a list of such lists."""
    kinds = set(map(type, value)) if type(value) is list else set()
    if type(value) is str or value == [] or kinds in ({str}, {int}):
        good = True
    else:
        good = kinds == {list} and len(value) <= MAX_PROMPTS and all(set(map(type, ids)) <= {int} for ids in value)
    if not good:
        raise ValueError(
            f"must be a text, a list of texts, a list of token ids, or a list of at most {MAX_PROMPTS} such lists, got "
            f"{shown(value)}"
        )
    if kinds == {str} and len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} texts; at most {MAX_PROMPTS} are allowed")
    return value


def _check_biases(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is not dict or len(value) > MAX_IDS:
        got = f"{len(value)} entries" if type(value) is dict else shown(value)
        raise ValueError(f"must be an object with at most {MAX_IDS} entries, from token ids to numbers, got {got}")
    for key, bias in value.items():
        if type(bias) not in (int, float) or not abs(bias) < math.inf:  # isfinite() cannot take any integer
            raise ValueError(f"the bias of {key[:40]!r} must be a finite number, got {shown(bias)}")
    return value


def _check_metadata(value: Any) -> Any:
    if type(value) is dict and len(value) > MAX_METADATA:
        raise ValueError(f"may have at most {MAX_METADATA} entries, got {len(value)}")
    return value


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Biases = Annotated[
    dict[str, float] | None, PlainValidator(_check_biases, json_schema_input_type=dict[str, float] | None)
]
Metadata = Annotated[dict[str, str], BeforeValidator(_check_metadata), Field(max_length=MAX_METADATA)]
TokenIds = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
Words = Annotated[list[Annotated[str, Field(max_length=MAX_WORD_CHARS)]], Field(max_length=MAX_WORDS, fail_fast=True)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP, fail_fast=True)]
Messages = Annotated[list[T], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Parts = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]

# older names of vLLM's for what is in structured_outputs
GUIDED = ("guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex")

# field -> values that change nothing (None always does not)
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(GUIDED, ()),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}
# what to do instead
ADVICE = {
    **dict.fromkeys(GUIDED, "it is a field of structured_outputs"),
    "suffix": "put the text before and after the gap into the prompt, with the model's own fill-in-the-middle tokens",
}
# accepted and without effect, as in vLLM: they say who asks, or what to do with the answer afterwards
IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier"} | {"service_tier", "session_id", "store", "user", "verbosity"}
)


# fields of vLLM that mean in other APIs what they mean in chat
PASSED_ON = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "request_id",
    "seed",
    "stop_token_ids",
    "timeout",
)


def refuse_fields(request: BaseModel, refused: Mapping[str, str], inert: Sequence[Any]) -> None:
    """Raise ValidationError, with the reason, for a field of ``refused`` that is none of the ``inert`` values."""
    extra = request.model_extra or {}
    for name, reason in refused.items():
        if not any(extra.get(name) is value or extra.get(name) == value for value in inert):
            raise ValidationError(f"{name} is not supported: {reason}", parameter=name)


def unknown_fields(request: BaseModel, known: Collection[str], inside: Iterable[str]) -> list[str]:
    """Fields that are not known here: of ``request`` besides ``known``, and of the objects in its fields ``inside``."""
    found = set(request.model_extra or {}) - set(known)
    for name in inside:
        inner = getattr(request, name, None)
        if isinstance(inner, BaseModel):
            found |= {f"{name}.{field}" for field in inner.model_extra or {}}
    return sorted(found)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(BaseModel):
    """What completions and chat share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Biases = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    logprob_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: TokenIds | None = None
    prompt_logprob_start: int = 0
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool | None = None
    use_beam_search: bool | None = False
    best_of: int | None = None  # the beams' number; n of them are returned
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    vllm_xargs: dict[str, Any] | None = None  # SamplingParams.extra_args
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = "left"
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_metrics: bool | None = False
    return_cache_report: bool | None = False
    priority: int = 0
    timeout: float | None = None  # seconds
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None

    def refuse(self, table: dict[str, tuple[Any, ...]]) -> list[str]:
        """Raise ValidationError for a field of REFUSED or ``table`` that asks for something; the unknown fields."""
        if self.stream_options is not None and not self.stream:
            raise ValidationError("stream_options is only allowed when stream is true", parameter="stream_options")
        extra = self.model_extra or {}
        for name, inert in (REFUSED | table).items():
            value = extra.get(name)
            if value is not None and not any(type(value) is type(i) and value == i for i in inert):
                advice = f"; {ADVICE[name]}" if name in ADVICE else ""
                raise ValidationError(f"{name} is not supported by octavo{advice}", parameter=name)
        return unknown_fields(self, IGNORED.union(REFUSED, table), ("stream_options",))


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(BaseModel):
    model_config = ConfigDict(strict=True)
    name: ToolName


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["function"] = "function"
    function: FunctionName


ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS)] | dict[str, Any] = ""


class PastToolCall(BaseModel):
    """A call that the assistant made earlier in the conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


PastToolCalls = Annotated[list[PastToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts[ContentPart] | None = None
    name: str | None = None
    tool_calls: PastToolCalls | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name


class TemplateOptions(BaseModel):
    """How messages become a prompt; chat and /tokenize share it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None  # only where the server trusts requests with one
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    tools: ChatTools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ChatRequest(GenerationRequest, TemplateOptions):
    """POST /v1/chat/completions."""

    messages: Messages[ChatMessage]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_special_tokens: bool = False
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    echo: bool | None = False
    return_prompt_text: bool | None = False
