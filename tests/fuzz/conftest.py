"""Two depths: ``pytest tests/fuzz`` takes less than a minute, ``--hypothesis-profile=long`` as long as you have."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", max_examples=60, deadline=None, suppress_health_check=CHECKS)
settings.register_profile("long", max_examples=100_000, deadline=None, suppress_health_check=CHECKS)
