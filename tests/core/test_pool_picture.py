"""PoolPicture: what is drawn is what the pool and the block tables hold, while real requests run."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.messages import PoolPicture, PoolState, Reply, SetPin
from tests.core.checking_worker import Loop, cache_config, make_request
from tests.core.test_cache_queries import ask

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40)
PROMPT = list(range(9))  # two blocks of 4, and a part


def picture(loop: Loop) -> PoolState:
    """As it comes through a process border."""
    reply = Reply(ask(loop, PoolPicture()))
    answer = msgspec.msgpack.Decoder(Reply).decode(msgspec.msgpack.encode(reply)).answer
    assert isinstance(answer, PoolState)
    return answer


def states(loop: Loop) -> list[tuple[str, int, int | None]]:
    return [(one.state, one.ref_count, one.group) for one in picture(loop).blocks]


def test_a_block_is_free_then_referenced_then_cached() -> None:
    loop = Loop(CONFIG, cache_config(4), num_blocks=6, max_model_len=12)
    null, free = ("null", 0, None), ("free", 0, None)
    assert states(loop) == [null] + [free] * 5
    loop.add(make_request("a", PROMPT, max_tokens=2))
    loop.step()
    seen = picture(loop)
    assert seen.tables == {"a": [1, 2, 3]}
    assert states(loop) == [null] + [("referenced", 1, 0)] * 3 + [free] * 2
    hashes = loop.scheduler._book.requests["a"].hashes(4)
    assert [one.key for one in seen.blocks] == [b"", hashes[0][:8], hashes[1][:8], b"", b"", b""]
    assert seen.num_blocks == {"null": 1, "referenced": 3, "free": 2, "cached": 0}
    loop.run()
    assert states(loop) == [null, ("cached", 0, 0), ("cached", 0, 0)] + [free] * 3
    assert picture(loop).tables == {}
    ask(loop, SetPin(60.0, prompt_token_ids=PROMPT[:4]))
    assert states(loop)[1:3] == [("referenced", 1, 0), ("cached", 0, 0)], "a pin is a reference"


def test_requests_share_what_they_have_in_common() -> None:
    loop = Loop(CONFIG, cache_config(4), num_blocks=9)
    for name in ("a", "b"):
        loop.add(make_request(name, [*PROMPT, ord(name)], max_tokens=3))
    loop.step()
    seen = picture(loop)
    assert seen.tables["a"][:2] == seen.tables["b"][:2]
    assert [seen.blocks[i].ref_count for i in seen.tables["b"]] == [2, 2, 1]
    loop.run()


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_radix_index_keeps_the_last_block_too(index: str) -> None:
    loop = Loop(CONFIG, cache_config(4, prefix_index=index), num_blocks=6)
    loop.add(make_request("a", PROMPT, max_tokens=2))
    loop.run()
    last = picture(loop).blocks[3]
    assert (last.state, last.key) == ("cached" if index == "radix" else "free", b"")


def test_each_block_is_of_one_kv_group_and_counted_by_its_tables() -> None:
    loop = Loop(CONFIG, cache_config(4), num_blocks=41, windows=(None, 6))
    for number in range(3):
        loop.add(make_request(f"r{number}", [*PROMPT, *range(number, 9), 3], max_tokens=8))
    while loop.scheduler.has_requests():
        loop.step()
        seen = picture(loop)
        assert (seen.num_groups, seen.block_size) == (2, 4)
        held = Counter(block_id for table in seen.tables.values() for block_id in table if block_id)
        assert [one.ref_count for one in seen.blocks] == [held[i] for i in range(41)]
        for table in seen.tables.values():
            assert all(seen.blocks[i].group == entry % 2 for entry, i in enumerate(table) if i)
        assert sum(seen.num_blocks.values()) == 41
        pool = loop.scheduler._kv.pool
        assert seen.num_blocks["referenced"] == pool.num_usable - pool.num_free
    assert {one.group for one in picture(loop).blocks if one.state == "cached"} == {0, 1}
