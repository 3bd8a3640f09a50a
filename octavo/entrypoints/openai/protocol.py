"""The requests of the OpenAI API, field by field, with vLLM's additions.

Types and shapes are checked here; ranges in SamplingParams; what the model decides in ``prompts.py``. A field whose
feature octavo does not have is in one of the REFUSED tables: it is accepted with the values that change nothing and
refused with every other, so that no client believes it got what it asked for. Unknown fields are ignored, but named in
a header of the answer (``routing.note_ignored``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.entrypoints.openai.bounded import (
    Biases,
    Documents,
    Messages,
    Parts,
    Prompt,
    StopIds,
    StopString,
    StopStrings,
    TokenIds,
    Words,
)
from octavo.entrypoints.openai.tools import ChatTools, PastToolCalls, ToolChoice
from octavo.exceptions import ValidationError

# older names of vLLM's for what is in structured_outputs
GUIDED = ("guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex")

# field -> values that change nothing (None always does not)
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(GUIDED, ()),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
}
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"prompt_embeds": (), "suffix": ("",)}
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


def unknown_fields(request: BaseModel, known: Collection[str], inside: Iterable[str]) -> list[str]:
    """Fields that nobody knows: of ``request`` besides ``known``, and of the objects in its fields ``inside``."""
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

    @property
    def names_max_tokens(self) -> bool:
        """The client itself said how long the answer may be."""
        return self.max_tokens is not None or getattr(self, "max_completion_tokens", None) is not None

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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True


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


class TokenizeRequest(TemplateOptions):
    """POST /tokenize: exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    tokens: TokenIds
