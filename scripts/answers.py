"""Record the answers of three real models, or compare a new run with a record: ids and log-probabilities, bit for bit.

    python scripts/answers.py record answers.json        before a change that must not change any answer
    python scripts/answers.py compare answers.json       after it; exits 1 and names the first answers that differ

500 greedy answers to prompts of 4 to 600 words, some of which begin alike, in crowds, with log-probabilities. The
bits depend on the processor's kernels, so a record holds for the machine on which it was made.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

ANSWERS = {"smollm2-135m": 240, "gemma3-270m": 130, "qwen2.5-coder-0.5b": 130}
SHOWN = 5
TEXT = (
    "the a of and to in is was for on that with as his they at be this from have or one had by word but not what all "
    "were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people my than "
    "first water been call who oil its now find long down day did get come made may part def return class import self"
)


def prompts(count: int) -> list[str]:
    """The same ones every time. Every third continues one of eight common beginnings."""
    dice, words = random.Random(count), TEXT.split()
    beginnings = [" ".join(dice.choices(words, k=dice.randint(40, 300))) for _ in range(8)]
    made = []
    for index in range(count):
        text = " ".join(dice.choices(words, k=min(600, 4 + int(dice.expovariate(1 / 60)))))
        made.append(f"{beginnings[index % 8]} {text}" if index % 3 == 0 else text)
    return made


def answers(model: str, count: int) -> list[dict[str, Any]]:
    """Of each prompt: the ids, and per token the ids and log-probabilities of the best."""
    llm = LLM(model, max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)
    found = []
    for output in llm.generate(prompts(count), params):
        first = output.outputs[0]
        logprobs = [[(i, one.logprob) for i, one in token.items()] for token in first.logprobs or ()]
        found.append({"ids": list(first.token_ids), "logprobs": logprobs})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    made = {}
    for model, count in ANSWERS.items():
        print(f"{model}: {count} answers", file=sys.stderr)
        made[model] = answers(model, count)
    if args.what == "record":
        args.file.write_text(json.dumps(made))
        return 0
    known = json.loads(args.file.read_text())
    made = json.loads(json.dumps(made))
    pairs = [
        (model, i, a, b) for model in ANSWERS for i, (a, b) in enumerate(zip(known[model], made[model], strict=True))
    ]
    differ = [(model, i) for model, i, a, b in pairs if a != b]
    for model, i in differ[:SHOWN]:
        print(f"{model}, prompt {i}: was {known[model][i]['ids']}, is {made[model][i]['ids']}")
    print(f"{len(differ)} of {len(pairs)} answers differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
