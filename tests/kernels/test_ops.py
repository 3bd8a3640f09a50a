"""Every op of the table on every instruction set of this machine: right, and each row alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from octavo.program import OPS
from tests.kernels.kernel_programs import (
    CASES,
    ISAS,
    Chunk,
    OpCase,
    close_to,
    cpu,
    limits,
    random_weights,
    reference,
    step,
)

ALL = [pytest.param(case, id=f"{op}-{n}") for op, cases in CASES.items() for n, case in enumerate(cases)]
ROWS = 64


def one_token_requests(case: OpCase) -> list[Chunk]:
    """Requests with one new token each, at various positions."""
    rng = np.random.default_rng(1)
    tokens = rng.permutation(np.arange(ROWS) % case.vocab_size)
    positions = rng.integers(0, 100, ROWS)
    return [Chunk([int(t)], int(p), range(1 + 8 * n, 9 + 8 * n)) for n, (t, p) in enumerate(zip(tokens, positions))]


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(OPS)
    for op, cases in CASES.items():
        assert all(op in {o.kind for o in case.program().ops} for case in cases)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", ALL)
def test_equals_the_float64_reference(case: OpCase, isa: str) -> None:
    program, sizes = case.program(), limits()
    weights = random_weights(program)
    inputs = step(one_token_requests(case), sizes, [5, 63, 5, *range(40)], len(program.kv_groups))
    expected = reference(program, weights, sizes).run(inputs).rows("logits")
    close_to(cpu(program, weights, sizes, isa=isa, threads=2).run(inputs).rows("logits"), expected, case.tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", ALL)
def test_a_row_is_the_same_alone_and_in_any_batch(case: OpCase, isa: str) -> None:
    program, sizes = case.program(), limits()
    weights, requests = random_weights(program), one_token_requests(case)
    runnables = [cpu(program, weights, sizes, isa=isa, threads=threads) for threads in (1, 2)]
    step_of = partial(step, sizes=sizes, groups=len(program.kv_groups))
    alone = np.concatenate([runnables[0].run(step_of([request])).rows("logits").copy() for request in requests])
    for runnable in runnables:
        for batch in (2, 7, ROWS):
            for first in range(0, ROWS - batch + 1, batch):
                together = runnable.run(step_of(requests[first : first + batch])).rows("logits")
                np.testing.assert_array_equal(together.view(np.uint32), alone[first : first + batch].view(np.uint32))
