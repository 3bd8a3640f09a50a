"""transformers as an engine of compare.py: transformers_runner.py GGUF THREADS. bfloat16, padded on the left."""

from __future__ import annotations

import os
import sys

import protocol


def load() -> tuple[str, protocol.Generate]:
    import torch
    import transformers

    torch.set_num_threads(int(sys.argv[2]))
    folder, name = os.path.split(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        out = model.generate(ids, attention_mask=mask, do_sample=False, **lengths)
        return len(prompts) * (out.shape[1] - longest)

    return f"{transformers.__version__}, torch {torch.__version__}", generate


if __name__ == "__main__":
    protocol.serve(load)
