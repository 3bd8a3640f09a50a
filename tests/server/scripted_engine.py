"""An engine that says what a test has written, and templates like those of real models.

For the shapes of answers only; that models can be made to call tools is shown with real ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from octavo.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.messages import RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import render
from tests.server.fake_engine import FakeEngine, FakeTokenizer

# In the manner of Qwen's: tools in the system message, calls and thinking in tags, results as user turns.
HERMES_TEMPLATE = """
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
THINKING_TEMPLATE = (
    HERMES_TEMPLATE
    + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% elif add_generation_prompt %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)


class ScriptedTokenizer(FakeTokenizer):
    """Token id = code point, as far as these tests write."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.chat_template = template

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        template = options.pop("chat_template", None) or self.chat_template
        generate = options.pop("add_generation_prompt", True)
        continued = options.pop("continue_final_message", False)
        return render(
            template,
            messages,
            add_generation_prompt=generate,
            continue_final_message=continued,
            variables={"tools": None, **options},
        )


class ScriptedEngine(FakeEngine):
    """Sample i says ``scripts[i]`` (or round again), ``step`` characters a step."""

    def __init__(self, template: str = HERMES_TEMPLATE, *, step: int = 3) -> None:
        super().__init__(max_model_len=8192)
        self.tokenizer = ScriptedTokenizer(template)
        self.scripts: list[str] = [""]
        self.finish_reason = "stop"
        self.step = step
        self.prompts: list[str] = []

    async def _run(self, prompt: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        self.prompts.append("".join(map(chr, prompt)))
        delta = params.output_kind == RequestOutputKind.DELTA
        texts = [self.scripts[i % len(self.scripts)] for i in range(params.n)]
        step = self.step if delta else max(map(len, texts)) + 1
        longest = max(map(len, texts))
        for start in range(0, longest + 1, step):
            outputs = [
                CompletionOutput(
                    i,
                    text[start : start + step],
                    [ord(c) % 128 for c in text[start : start + step]],
                    0.0,
                    None,
                    self.finish_reason if start + step > longest else None,
                )
                for i, text in enumerate(texts)
            ]
            last = start + step > longest
            yield RequestOutput("r", None, prompt, outputs, last, None, RequestMetrics(arrival_time=0.0))
