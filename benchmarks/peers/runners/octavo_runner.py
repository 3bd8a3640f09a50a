"""octavo as an engine of compare.py: octavo_runner.py MODEL THREADS."""

from __future__ import annotations

import sys

import protocol


def load() -> tuple[str, protocol.Generate]:
    import octavo
    from octavo import LLM, SamplingParams

    llm = LLM(sys.argv[1], threads=int(sys.argv[2]), max_model_len=2048, kv_cache_memory="2GiB")

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return octavo.__version__, generate


if __name__ == "__main__":
    protocol.serve(load)
