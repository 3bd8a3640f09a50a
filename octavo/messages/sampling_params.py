"""SamplingParams: how the next token is chosen and when a request stops. Validated once, here, for Python and HTTP."""

from __future__ import annotations

import enum
import math
import numbers
from typing import Any

import msgspec

from octavo.exceptions import ValidationError
from octavo.messages.structured_outputs import StructuredOutputsParams

SAMPLING_EPS = 1e-5
MAX_SEED = 2**63 - 1
FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput carries."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end


def _fail(name: str, value: object, rule: str) -> None:
    raise ValidationError(f"{name} must be {rule}, got {value!r}", parameter=name, value=repr(value))


def _number(name: str, value: object, low: float, high: float, rule: str, *, open_low: bool = False) -> None:
    """Reject non-numbers, NaN, infinities and values outside the range (a plain ``<`` lets NaN pass)."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low < value if open_low else low <= value) or not value <= high:  # type: ignore[operator]
        _fail(name, value, rule)


def _integer(name: str, value: object, low: int, high: int | None, rule: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        _fail(name, value, rule)


def _plain(name: str, value: Any) -> Any:
    """``value`` as the field holds it: one stop string is a list, None an empty one, numpy's scalars are Python's."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name in ("stop", "stop_token_ids") and (value is None or isinstance(value, tuple)):
        return list(value or ())
    if name == "logit_bias" and isinstance(value, dict):
        return {int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k: v for k, v in value.items()}
    if type(value) in (int, float, bool, list, RequestOutputKind) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one request; names, defaults and ranges are vLLM's.

    Construction validates everything that does not depend on the model and raises ``ValidationError`` naming the
    field; :meth:`verify` checks token ids and counts against a model.
    """

    n: int = 1
    temperature: float = 1.0  # [0, 2]; below 1e-5 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], output tokens
    frequency_penalty: float = 0.0  # [-2, 2], output tokens
    repetition_penalty: float = 1.0  # [1e-6, 1e6], so that no logit overflows; prompt and output tokens
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    logprobs: int | None = None  # top k besides the sampled token
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if (plain := _plain(name, value)) is not value:
                msgspec.structs.force_setattr(self, name, plain)
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                _fail(name, getattr(self, name), "true or false")
        if not isinstance(self.output_kind, RequestOutputKind):
            _fail("output_kind", self.output_kind, "a RequestOutputKind")
        _integer("n", self.n, 1, 128, "an integer in [1, 128]")
        _number("temperature", self.temperature, 0.0, 2.0, "in [0, 2]")
        _number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", open_low=True)
        _integer("top_k", self.top_k, -1, None, "-1 or 0 (off) or a positive integer")
        _number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "in [1e-6, 1e6]")
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None, "at least 1")
        _integer("min_tokens", self.min_tokens, 0, None, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, None, "0 or more")
        self._check_stop()
        self._check_logit_bias()

    def _check_stop(self) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(s, str) and s for s in self.stop):
            _fail("stop", self.stop, "a list of non-empty strings")
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "empty when detokenize is false")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | None):
                _fail(name, ids, "a list of token ids")
            for token_id in ids or []:
                _integer(name, token_id, 0, None, "a list of token ids")

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, dict | None):
            _fail("logit_bias", self.logit_bias, "a map from token ids")
        for key, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", key, 0, None, "a map from token ids")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
                _fail("logit_bias", {key: bias}, "a map to finite numbers")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _fail("allowed_token_ids", self.allowed_token_ids, "a non-empty list")

    def verify(self, *, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check against a model: ids in ``[0, vocab_size)`` (width of the logits), logprobs within the server's cap."""
        ids: list[tuple[str, list[int]]] = [("stop_token_ids", self.stop_token_ids)]
        ids.append(("logit_bias", list(self.logit_bias or {})))
        ids.append(("allowed_token_ids", self.allowed_token_ids or []))
        for name, values in ids:
            for token_id in values:
                _integer(name, token_id, 0, vocab_size - 1, f"token ids in [0, {vocab_size - 1}]")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                _fail(name, value, f"at most {max_logprobs}")

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    def replace(self, **changes: Any) -> SamplingParams:
        """A validated copy with ``changes``."""
        return msgspec.structs.replace(self, **changes)
