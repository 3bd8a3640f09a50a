"""What the type of the KV cache costs: the next token's logprob on a fixed text, beside bfloat16 and float32.

Every KV type runs the text of kv_quality.txt through the CPU backend in one step. float32 is the reference backend, and
has weights and activations in float32 too. Prints a Markdown table for each model: bytes a token, perplexity, mean
difference of the next token's logprob (signed, and absolute), and how often the most probable token is the same.

    python benchmarks/kv_quality.py [MODEL ...] [--cache-dir DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from octavo.args.engine_args import engine_config_from_kwargs
from octavo.args.resolve import resolve_engine_config
from octavo.backends.base import Backend, Limits, StepInputs
from octavo.backends.registry import make_backend
from octavo.config import BackendConfig, KVDtype, ModelConfig
from octavo.model_loader import LoadedModel, load_model
from octavo.tokenizer import load_tokenizer

Floats = npt.NDArray[np.float64]
BLOCK = 16
TEXT = Path(__file__).with_suffix(".txt")


def logprobs(backend: Backend, loaded: LoadedModel, tokens: npt.NDArray[np.int32], kv: KVDtype) -> Floats:
    """Of all tokens of the vocabulary after each of ``tokens`` [N] -> [N, vocab_size]."""
    count, blocks = len(tokens), -(-len(tokens) // BLOCK)
    every = np.arange(count, dtype=np.int32)
    inputs = StepInputs(
        token_ids=tokens,
        positions=every,
        slot_mapping=every + BLOCK,
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        logit_rows=every,
    )
    limits = Limits(count, count, 1, blocks, blocks + 1, BLOCK, kv)
    logits = backend.prepare(loaded.program, loaded.weights, limits).run(inputs).rows("logits").astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def line(name: str, size: int, ours: Floats, others: list[Floats], tokens: npt.NDArray[np.int32]) -> str:
    """A row of the table: ``ours`` beside each of ``others``."""
    rows = np.arange(len(tokens) - 1)
    own = ours[rows, tokens[1:]]
    cells = [name, f"{size:,}", f"{np.exp(-own.mean()):.3f}"]
    for other in others:
        difference = own - other[rows, tokens[1:]]
        same = (ours.argmax(axis=1) == other.argmax(axis=1)).mean()
        cells.append(f"{difference.mean():+.4f}, {np.abs(difference).mean():.4f}, {same:.1%}")
    return f"| {' | '.join(cells)} |"


def measure(model: str, cache_dir: str | None) -> None:
    path = resolve_engine_config(engine_config_from_kwargs(model=model, cache_dir=cache_dir)).model.model
    loaded = load_model(ModelConfig(model=path))
    text = TEXT.read_text(encoding="utf-8")
    tokens = np.array(load_tokenizer(path).encode(text, add_special_tokens=False), np.int32)
    cpu, reference = make_backend(BackendConfig(backend="cpu")), make_backend(BackendConfig(backend="reference"))
    exact = logprobs(reference, loaded, tokens, "auto")
    plain = logprobs(cpu, loaded, tokens, "bfloat16")
    print(f"\n{model}, {len(tokens)} tokens; differences: mean, mean of absolute ones, same most probable token\n")
    print("| KV | bytes a token | perplexity | beside bfloat16 | beside float32 |")
    print("|---|---|---|---|---|")
    for kv in (kind for kind in get_args(KVDtype) if kind != "auto"):
        size = sum(cpu.kv_bytes(layer, kv) for layer in loaded.program.kv_layers)
        ours = plain if kv == "bfloat16" else logprobs(cpu, loaded, tokens, kv)
        print(line(kv, size, ours, [plain, exact], tokens), flush=True)
    size = 4 * sum(layer.width for layer in loaded.program.kv_layers)
    print(line("float32", size, exact, [plain, exact], tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m", "qwen2.5-coder-0.5b"])
    parser.add_argument("--cache-dir", help="where models are kept")
    args = parser.parse_args()
    for model in args.models:
        measure(model, args.cache_dir)


if __name__ == "__main__":
    main()
