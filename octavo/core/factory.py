"""make_scheduler: a Scheduler with the policy, the admission rules and the observers that a configuration asks for.

A new rule, requirement or observer is a class of its own and one line in a list here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.config import CacheConfig, SchedulerConfig
from octavo.config.choices import SCHEDULING_POLICIES
from octavo.core.admission import LengthLimits, MaxNumSeqs, Requirement, TenantSeats
from octavo.core.kv_cache.event_log import NO_EVENTS, EventLog
from octavo.core.kv_cache.manager import KVCacheManager
from octavo.core.kv_cache.pins import PinLimits
from octavo.core.longest_prefix import by_prefix
from octavo.core.observers import Counters, MissReports, PinWishes
from octavo.core.policy import Policy
from octavo.core.scheduler import Scheduler
from octavo.core.suspects import Suspects
from octavo.exceptions import ConfigError
from octavo.kv_transfer.chain import TierChain
from octavo.messages import FULL, KVSpec, blocks_at_once, max_tokens_that_fit
from octavo.utils.registry import resolve


def make_scheduler(
    config: SchedulerConfig,
    cache: CacheConfig,
    num_blocks: int,
    max_model_len: int,
    *,
    groups: Sequence[KVSpec] = (FULL,),
    requirements: Sequence[Requirement] = (),
    tiers: TierChain | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """``num_blocks`` includes the null block; ``clock`` gives seconds; ``requirements``: what only the engine knows.

    Raises ConfigError if no block is usable.
    """
    if num_blocks < 2:
        raise ConfigError(f"num_blocks = {num_blocks}: must be at least 2 (one is the null block)")
    kv = KVCacheManager(
        num_blocks,
        cache.block_size,
        groups,
        tiers,
        enable_prefix_caching=cache.enable_prefix_caching,
        prefix_index=cache.prefix_index,
        ahead=config.tokens_ahead,
        pin_limits=pin_limits(
            cache, num_blocks, blocks_at_once(max_model_len, cache.block_size, groups, config.tokens_ahead)
        ),
        clock=clock,
        events=EventLog(groups) if cache.kv_events.enabled else NO_EVENTS,
    )
    suspects = Suspects()
    return Scheduler(
        config,
        kv,
        make_policy(config, kv),
        LengthLimits(
            max_model_len=max_model_len,
            max_kv_tokens=max_tokens_that_fit(num_blocks, cache.block_size, groups, config.tokens_ahead),
            max_step_tokens=None if config.enable_chunked_prefill else config.step_tokens,
        ),
        suspects,
        rules=[MaxNumSeqs(config.max_num_seqs), suspects],
        requirements=[TenantSeats(), *requirements],
        observers=[Counters(), suspects, PinWishes(kv), MissReports(kv)],
        clock=clock,
    )


def make_policy(config: SchedulerConfig, kv: KVCacheManager) -> Policy:
    """The policy by its name, behind :class:`LongestPrefixFirst` where the configuration allows overtaking."""
    policy: Policy = resolve(SCHEDULING_POLICIES[config.scheduling_policy])(config)
    return by_prefix(policy, config.longest_prefix_first, lambda request: kv.find_prefix(request).num_tokens)


def pin_limits(cache: CacheConfig, num_blocks: int, longest: int) -> PinLimits:
    """What pins may take away from ``num_blocks`` blocks, the null block included.

    Beside them the longest request, which holds ``longest``, still fits, so that what can ever run can always run.
    """
    usable = num_blocks - 1
    most = max(0, min(int(cache.max_pinned_share * usable), usable - longest)) if cache.enable_prefix_caching else 0
    return PinLimits(most, min(most, int(cache.tenant_pinned_share * usable)))
