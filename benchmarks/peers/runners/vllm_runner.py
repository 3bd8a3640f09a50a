"""vLLM as an engine of compare.py: vllm_runner.py FOLDER THREADS. bfloat16; the threads come from its environment."""

from __future__ import annotations

import sys

import protocol


def load() -> tuple[str, protocol.Generate]:
    import vllm

    llm = vllm.LLM(sys.argv[1], dtype="bfloat16", max_model_len=2048, max_num_seqs=64, disable_log_stats=True)

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return vllm.__version__, generate


if __name__ == "__main__":
    protocol.serve(load)
