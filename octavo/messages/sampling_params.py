"""SamplingParams: how the next token is chosen and when a request stops. Validated once, here, for Python and HTTP."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from octavo.config import SamplingConfig
from octavo.exceptions import ValidationError
from octavo.messages.structured_outputs import StructuredOutputsParams

SAMPLING_EPS = 1e-5
MAX_SEED = 2**63 - 1
MAX_INTEGER = 2**63 - 1  # what a message to the engine core can carry
MAX_LOGIT_BIAS = 100.0  # OpenAI's range is [-100, 100]; values beyond are clamped
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORD = 256  # characters
MAX_PATTERN = 1024  # tokens
MAX_LENGTH_PENALTY = 10.0  # either way
SHOWN = 80  # characters of a wrong value in a message

FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "flat_logprobs",
)
TEXT_LISTS = ("stop", "bad_words")
ID_LISTS = (
    "stop_token_ids",
    "allowed_token_ids",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "shown_special_token_ids",
)


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput carries."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _fail(name: str, value: object, rule: str) -> None:
    shown = _shown(value)
    raise ValidationError(f"{name} must be {rule}, got {shown}", parameter=name, value=shown)


def _number(name: str, value: object, low: float, high: float, rule: str, *, open_low: bool = False) -> None:
    """Reject non-numbers, NaN, infinities and values outside the range (a plain ``<`` lets NaN pass)."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not ok or (open_low and value == low):
        _fail(name, value, rule)


def _integer(name: str, value: object, low: int, high: int | None, rule: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        _fail(name, value, rule)
    if value > MAX_INTEGER:  # type: ignore[operator]
        _fail(name, value, f"at most {MAX_INTEGER}")


def _ids(name: str, ids: Iterable[Any], limit: int | None, rule: str) -> None:
    """Name the first of ``ids`` that is no integer in [0, limit). Lists are long: the usual case is not a loop."""
    listed = list(ids)
    if (
        set(map(type, listed)) <= {int}
        and min(listed, default=0) >= 0
        and (limit is None or max(listed, default=0) < limit)
    ):
        return
    for one in listed:
        _integer(name, one, 0, None if limit is None else limit - 1, rule)


def _plain(name: str, value: Any) -> Any:
    """``value`` as the field holds it: one string is a list, None an empty one, numpy's scalars are Python's."""
    if name in TEXT_LISTS and isinstance(value, str):
        return [value]
    if name in (*TEXT_LISTS, "stop_token_ids") and value is None:
        return []
    if name in (*TEXT_LISTS, *ID_LISTS) and isinstance(value, list | tuple | range):
        if type(value) is list and set(map(type, value)) <= {int, str}:
            return value
        return [int(v) if isinstance(v, numbers.Integral) and not isinstance(v, bool) else v for v in value]
    if name == "logit_bias" and isinstance(value, dict):
        return value if set(map(type, value)) <= {int} else {_plain_key(k): v for k, v in value.items()}
    if name in OBJECTS and isinstance(value, dict):
        return OBJECTS[name].of(value)
    if name in ("seed", "thinking_token_budget") and type(value) is int and value == -1:
        return None
    if name in ("n", "top_k") and type(value) is int:  # beyond what a message carries: all the same to either
        return min(value, MAX_INTEGER)
    if type(value) in (int, float, bool, list, RequestOutputKind) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _plain_key(key: Any) -> Any:
    """JSON's keys are text: a token id written as text is that token id."""
    if isinstance(key, str):
        return int(key) if key.isascii() and key.isdigit() and len(key) <= 20 else key
    return int(key) if isinstance(key, numbers.Integral) and not isinstance(key, bool) else key


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """End a request whose output ends with one pattern of tokens repeated at least ``min_count`` times in a row.

    Patterns have ``min_pattern_size`` (0 means 1) to ``max_pattern_size`` tokens; 0 for the latter turns it off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    @classmethod
    def of(cls, fields: dict[str, Any]) -> RepetitionDetectionParams:
        """From a JSON object. Raises ValidationError for a field that is unknown."""
        for name in fields:
            if name not in cls.__struct_fields__:
                _fail("repetition_detection", name, f"an object with the fields {', '.join(cls.__struct_fields__)}")
        return cls(**fields)

    def __post_init__(self) -> None:
        rules = {"max_pattern_size": MAX_PATTERN, "min_pattern_size": MAX_PATTERN, "min_count": MAX_INTEGER}
        for name, high in rules.items():
            rule = f"an object whose {name} is an integer in [0, {high}]"
            _integer("repetition_detection", getattr(self, name), 0, high, rule)
        if self.min_pattern_size > self.max_pattern_size:
            rule = f"an object whose min_pattern_size is at most its max_pattern_size ({self.max_pattern_size})"
            _fail("repetition_detection", self.min_pattern_size, rule)
        if self.max_pattern_size > 0 and self.min_count < 2:
            _fail("repetition_detection", self.min_count, "an object whose min_count is 2 or more")


# fields that a dict may fill too
OBJECTS: dict[str, type[RepetitionDetectionParams] | type[StructuredOutputsParams]] = {
    "repetition_detection": RepetitionDetectionParams,
    "structured_outputs": StructuredOutputsParams,
}


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens around a model's thinking. ``start`` is None where the prompt has opened it."""

    start: int | None
    end: int


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the ``beam_width`` most probable sequences instead of drawing one; names and meaning are transformers'.

    A finished sequence scores (sum of its tokens' log-probabilities) / (its output's length ** ``length_penalty``).
    ``early_stopping`` True: stop with the ``beam_width``-th finished sequence; False: when the best running one, at its
    present length, scores no better than the worst of these; "never": when it could not even at full length.
    """

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, None, "an integer, at least 1")
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, "in [-10, 10]")
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            _fail("early_stopping", self.early_stopping, 'true, false or "never"')


# What would change a beam's log-probabilities or end, or need rows that beams do not have: the field's neutral values.
NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "stop": ([],),
    "bad_words": ([],),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "logprob_token_ids": (None, []),
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
    "repetition_detection": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one request; names, defaults and ranges are vLLM's.

    Construction validates everything that does not depend on the model and raises ``ValidationError`` naming the
    field; :meth:`verify` checks token ids and counts against a model and a server's limits. ``docs/reference/
    sampling.md`` says what each field does.
    """

    n: int = 1
    temperature: float = 1.0  # [0, 2]; below 1e-5 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], output tokens
    frequency_penalty: float = 0.0  # [-2, 2], output tokens
    repetition_penalty: float = 1.0  # [1e-6, 1e6], so that no logit overflows; prompt and output tokens
    seed: int | None = None  # -1 is None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    logprobs: int | None = None  # top k besides the sampled token; -1: the whole vocabulary
    logprob_token_ids: list[int] | None = None  # these instead of the top k
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int = 0  # first position whose logits are scored; its own token is not
    flat_logprobs: bool = False  # FlatLogprobs instead of a list of dicts
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_token_ids: list[int] = []  # those that skip_special_tokens leaves in the text
    spaces_between_special_tokens: bool = True  # accepted; tokenizers here put none
    logit_bias: dict[int, float] | None = None  # clamped to [-100, 100]
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens of thinking before it is closed; -1 is None
    thinking: ThinkingTokens | None = None  # what the budget needs to know of the model
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None  # None: only as far as prompt logprobs need it
    stream_interval: int | None = None  # tokens between two outputs; a server's own, if greater, holds
    extra_args: dict[str, Any] | None = None  # accepted; no part of octavo reads them
    beam_search: BeamSearch | None = None  # its n best sequences; nothing is drawn, so temperature, top_p ... are idle
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if (plain := _plain(name, value)) is not value:
                msgspec.structs.force_setattr(self, name, plain)
        self._check_kinds()
        self._check_numbers()
        self._check_counts()
        self._check_texts()
        for name in ID_LISTS:
            if (ids := getattr(self, name)) is not None:
                if not isinstance(ids, list):
                    _fail(name, ids, "a list of token ids")
                _ids(name, ids, None, "a list of token ids")
        self._check_id_lists()
        self._check_logit_bias()
        if self.beam_search is not None:
            self._check_beam_search(self.beam_search)

    def _check_kinds(self) -> None:
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                _fail(name, getattr(self, name), "true or false")
        if type(self.skip_reading_prefix_cache) not in (bool, type(None)):
            _fail("skip_reading_prefix_cache", self.skip_reading_prefix_cache, "true, false or null")
        if not isinstance(self.output_kind, RequestOutputKind):
            _fail("output_kind", self.output_kind, "a RequestOutputKind")
        for name, kind in OBJECTS.items():
            if not isinstance(getattr(self, name), kind | None):
                _fail(name, getattr(self, name), f"an object, or {kind.__name__}")
        if not isinstance(self.thinking, ThinkingTokens | None):
            _fail("thinking", self.thinking, "ThinkingTokens")
        extra = self.extra_args
        if extra is not None and not (isinstance(extra, dict) and all(isinstance(key, str) for key in extra)):
            _fail("extra_args", extra, "a dict with names as keys")
        try:
            msgspec.msgpack.encode(extra)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            _fail("extra_args", extra, f"what a message can carry ({error})")

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0, "in [0, 2]")
        _number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", open_low=True)
        _integer("top_k", self.top_k, -1, None, "-1 or 0 (off) or a positive integer")
        _number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "in [1e-6, 1e6]")

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, None, "an integer, at least 1")
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None, "at least 1")
        _integer("min_tokens", self.min_tokens, 0, None, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, -1, None, "0 or more, or -1 for the whole vocabulary")
        _integer("prompt_logprob_start", self.prompt_logprob_start, 0, None, "0 or more")
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0, None, "0 or more, or -1 for no limit")
        if self.stream_interval is not None:
            _integer("stream_interval", self.stream_interval, 1, None, "at least 1")

    def _check_texts(self) -> None:
        for name in TEXT_LISTS:
            texts = getattr(self, name)
            if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
                _fail(name, texts, "a list of non-empty strings")
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "empty when detokenize is false")
        for word in self.bad_words:
            if len(word) > MAX_BAD_WORD:
                _fail("bad_words", word, f"strings of at most {MAX_BAD_WORD} characters")

    def _check_id_lists(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _fail("allowed_token_ids", self.allowed_token_ids, "a non-empty list")
        wanted = self.logprob_token_ids
        if wanted is not None and len(wanted) > MAX_LOGPROB_TOKEN_IDS:
            _fail("logprob_token_ids", len(wanted), f"a list of at most {MAX_LOGPROB_TOKEN_IDS} token ids")
        if wanted and self.logprobs not in (None, len(wanted)):
            _fail("logprobs", self.logprobs, f"absent, or the number of logprob_token_ids ({len(wanted)})")
        wanted = self.prompt_logprob_token_ids
        if wanted is not None and (not wanted or len(set(wanted)) != len(wanted)):
            _fail("prompt_logprob_token_ids", wanted, "a non-empty list of token ids, none of them twice")
        if wanted and self.prompt_logprobs not in (None, len(wanted)):
            rule = f"absent, or the number of prompt_logprob_token_ids ({len(wanted)})"
            _fail("prompt_logprobs", self.prompt_logprobs, rule)

    def _check_logit_bias(self) -> None:
        biases = self.logit_bias
        if not isinstance(biases, dict | None):
            _fail("logit_bias", biases, "a map from token ids to numbers")
        if not biases:
            return
        _ids("logit_bias", biases, None, "a map from token ids to numbers")
        values = biases.values()
        plain = set(map(type, values)) == {float} and not math.isnan(sum(values))
        if plain and min(values) >= -MAX_LOGIT_BIAS and max(values) <= MAX_LOGIT_BIAS:
            return
        for token_id, bias in biases.items():  # abs() and not isfinite(), for which integers may be too large
            if isinstance(bias, bool) or not isinstance(bias, numbers.Real) or not abs(bias) < math.inf:
                _fail("logit_bias", {token_id: bias}, "a map from token ids to finite numbers")
        clamped = {key: float(max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))) for key, bias in biases.items()}
        msgspec.structs.force_setattr(self, "logit_bias", clamped)

    def _check_beam_search(self, beams: BeamSearch) -> None:
        if not isinstance(beams, BeamSearch):
            _fail("beam_search", beams, "a BeamSearch, or absent")
        if self.n > beams.beam_width:
            _fail("n", self.n, f"at most beam_width ({beams.beam_width}) with beam search")
        for name, neutral in NOT_WITH_BEAMS.items():
            if (value := getattr(self, name)) not in neutral:
                _fail(name, value, "absent with beam search")

    def verify(self, *, vocab_size: int, limits: SamplingConfig) -> None:
        """Check against a model and a server's limits.

        Ids must be in ``[0, vocab_size)``, the width of the logits. Raises ValidationError naming field and limit.
        """
        for name in (*ID_LISTS, "logit_bias"):
            if ids := getattr(self, name):
                _ids(name, ids, vocab_size, f"token ids in [0, {vocab_size - 1}]")
        if self.thinking is not None:
            ends = [i for i in (self.thinking.start, self.thinking.end) if i is not None]
            _ids("thinking", ends, vocab_size, f"token ids in [0, {vocab_size - 1}]")
        if self.n > limits.max_n:
            _fail("n", self.n, f"at most {limits.max_n}, the server's --max-n")
        if self.beam_search is not None and self.beam_search.beam_width > limits.max_n:
            rule = f"at most {limits.max_n}, the server's --max-n (over HTTP it is best_of, or n)"
            _fail("beam_width", self.beam_search.beam_width, rule)
        if len(self.bad_words) > limits.max_bad_words:
            rule = f"a list of at most {limits.max_bad_words} words, the server's --max-bad-words"
            _fail("bad_words", f"{len(self.bad_words)} words", rule)
        most = vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            asked = vocab_size if value == -1 else value
            if asked is not None and asked > most and not (name == "logprobs" and self.logprob_token_ids):
                _fail(name, value, f"at most {most}, the server's --max-logprobs")
        if len(self.prompt_logprob_token_ids or ()) > most:
            count = len(self.prompt_logprob_token_ids or ())
            _fail("prompt_logprob_token_ids", f"{count} ids", f"at most {most} ids, the server's --max-logprobs")

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def wants_logprobs(self) -> bool:
        """Whether sampled tokens come with logprobs."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens come with logprobs."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def replace(self, **changes: Any) -> SamplingParams:
        """A validated copy with ``changes``."""
        return msgspec.structs.replace(self, **changes)
