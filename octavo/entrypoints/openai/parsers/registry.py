"""Parsers by name, and which of them a chat template calls for."""

from __future__ import annotations

import importlib

from octavo.entrypoints.openai.parsers.reasoning_format import ReasoningFormat
from octavo.entrypoints.openai.parsers.tool_format import ToolFormat
from octavo.exceptions import ConfigError

PACKAGE = "octavo.entrypoints.openai.parsers"

TOOL_PARSERS = {
    "hermes": f"{PACKAGE}.hermes:FORMAT",
    "llama3_json": f"{PACKAGE}.llama3_json:FORMAT",
    "mistral": f"{PACKAGE}.mistral:FORMAT",
    "qwen3_coder": f"{PACKAGE}.qwen3_coder:FORMAT",
    "qwen3_xml": f"{PACKAGE}.qwen3_coder:FORMAT",
}
REASONING_PARSERS = {
    "deepseek_r1": f"{PACKAGE}.think:FORMAT",
    "mistral": f"{PACKAGE}.think:MISTRAL",
    "qwen3": f"{PACKAGE}.think:FORMAT",
}


def tool_format(name: str) -> ToolFormat:
    """Raises ConfigError for an unknown name."""
    found = _load("tool_call_parser", name, TOOL_PARSERS)
    assert isinstance(found, ToolFormat)
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ConfigError for an unknown name."""
    found = _load("reasoning_parser", name, REASONING_PARSERS)
    assert isinstance(found, ReasoningFormat)
    return found


def _load(setting: str, name: str, table: dict[str, str]) -> object:
    if name not in table:
        raise ConfigError(f"{setting} = {name!r}: must be auto, none, or one of {', '.join(table)}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


# What a template writes -> the parser that reads it; the first that matches. A template with one of FOREIGN has a
# format of its own behind a familiar tag.
FOREIGN = ("<arg_key>", "[func_name1(params_name1=", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>")
TOOL_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)


def tool_parser_for(template: str) -> str | None:
    """The name of the parser for what ``template`` makes a model write; None where it shows no known format."""
    if any(mark in template for mark in FOREIGN):
        return None
    return next((name for mark, name in TOOL_MARKS if mark in template), None)


def reasoning_parser_for(template: str) -> str | None:
    """The name of the parser for a template that handles thinking; None where it does not."""
    if "<think>" in template or "</think>" in template:
        return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
    return "mistral" if "[THINK]" in template else None
