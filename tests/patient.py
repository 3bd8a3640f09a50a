"""httpx with more patience than its own five seconds, which a machine that is busy with other tests may well need."""

from __future__ import annotations

import functools

import httpx

SECONDS = 280  # less than the time-out of a test

get = functools.partial(httpx.get, timeout=SECONDS)
post = functools.partial(httpx.post, timeout=SECONDS)
delete = functools.partial(httpx.delete, timeout=SECONDS)
stream = functools.partial(httpx.stream, timeout=SECONDS)
Client = functools.partial(httpx.Client, timeout=SECONDS)
