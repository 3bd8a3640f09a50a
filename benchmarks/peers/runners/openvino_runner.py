"""OpenVINO GenAI as an engine of compare.py: openvino_runner.py GGUF THREADS. It reads the GGUF file itself."""

from __future__ import annotations

import sys

import protocol


def load() -> tuple[str, protocol.Generate]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = 64
    pipeline = genai.ContinuousBatchingPipeline(
        sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos, config.do_sample = True, False
        tensors = [ov.Tensor(np.asarray(prompt, np.int64)[None]) for prompt in prompts]
        results = pipeline.generate(tensors, [config] * len(tensors))
        return sum(len(result.m_generation_ids[0]) for result in results)

    return genai.__version__, generate


if __name__ == "__main__":
    protocol.serve(load)
