"""Lengths of prompts and answers like those of two well-known data sets, for benchmarks that need no text.

The means are those that the PagedAttention paper reports (Kwon et al., SOSP 2023, section 6.1) of Stanford Alpaca's
instructions and of ShareGPT's conversations. Their spread is not reported as numbers: log-normal distributions with the
sigmas below look like the paper's figure 11, and are our choice. Fixed seeds give the same lengths everywhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LONGEST = 1024  # tokens of a prompt, or of an answer: longer ones are cut


@dataclass(frozen=True)
class Lengths:
    """Two log-normal distributions, by mean (tokens, before cutting) and sigma (of the logarithm)."""

    name: str
    mean_input: float
    sigma_input: float
    mean_output: float
    sigma_output: float

    def draw(self, count: int, seed: int = 0) -> list[tuple[int, int]]:
        """``count`` pairs (tokens of the prompt, tokens of the answer), each 1 .. LONGEST."""
        rng = random.Random(f"{self.name} {seed}")

        def one(mean: float, sigma: float) -> int:
            length = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
            return min(LONGEST, max(1, round(length)))

        return [
            (one(self.mean_input, self.sigma_input), one(self.mean_output, self.sigma_output)) for _ in range(count)
        ]


ALPACA = Lengths("Alpaca", 19.31, 0.6, 58.45, 0.9)
SHAREGPT = Lengths("ShareGPT", 161.31, 1.2, 337.99, 0.9)
