"""What a request asks for beside its prompt and its sampling: one struct for each part of the engine that reads it.

They are made where a request is read and travel whole to the part that uses them.
"""

from __future__ import annotations

import msgspec

from octavo.messages.cache import CachePin


class Tenant(msgspec.Struct, frozen=True, array_like=True):
    """Requests of the same ``name`` share what a tenant may have. ``weight`` is its share beside others'."""

    name: str = ""
    weight: float = 1.0
    max_running: int | None = None  # sequences in the batch


class SchedulingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """For the scheduler: how urgent a request is, and whose.

    The caller gives the tenant's name; the engine's front end adds the tenant's limits and caps the timeout.
    """

    priority: int = 0  # the lowest goes first, where the policy heeds it
    tenant: Tenant = Tenant()
    timeout: float | None = None  # seconds after its arrival: it is not worth starting afterwards


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """For the prefix cache."""

    salt: str | None = None  # only requests with the same one share blocks
    pins: tuple[CachePin, ...] = ()  # of its prompt, shortest first


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request wants to be told of itself beside its answer; nothing in here may change the answer.

    So requests that differ in this alone are equal to the quarantine.
    """

    cache_miss: bool = False  # why no more of its prompt was found


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """For the sampler and the end of the output: what the model's tokenizer makes of the sampling parameters."""

    eos_token_ids: list[int] = []  # ids that end the sequence unless ignore_eos (generation_config + tokenizer)
    bad_words_token_ids: list[list[int]] = []  # sequences of ids, each of which must not be completed
    grammar: str | None = None  # that the output must follow, as the checker of structured_output wrote it
