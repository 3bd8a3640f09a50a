"""``octavo serve [MODEL]``: the server's life, from the socket to the last answer.

bind the socket ── HTTP answers (/health: 503, with the phase)
             └── fetch the model ── start the engine ── /health: 200
SIGTERM ── new requests: 503, /health: 503 ── running ones get --shutdown-timeout ── the rest ends with an error ── exit
a second signal ── exit at once
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from octavo.args.engine_args import (
    add_engine_arguments,
    add_server_arguments,
    chat_config_from_namespace,
    engine_config_from_namespace,
    log_config_from_namespace,
    server_config_from_namespace,
)
from octavo.args.tenants import read_tenants
from octavo.cli import listen
from octavo.cli.announce import announce, announce_facts, complain
from octavo.config import ChatConfig, EngineConfig, LogConfig, ServerConfig
from octavo.exceptions import ConfigError, OctavoError
from octavo.utils.logs import set_up

if TYPE_CHECKING:
    import ssl

    import uvicorn

    from octavo.engine.async_llm import AsyncLLM
    from octavo.entrypoints.server.state import ServedModel, ServerState

logger = logging.getLogger("octavo.server")

GRACE = 5.0  # seconds after the drain in which the last answers may be read
MANY_LOGPROBS = 1000  # of a token; the whole vocabulary takes the front end some 50 ms a token
KEEP_ALIVE = 60  # seconds that an idle connection stays open


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_server_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop; 0 after a requested stop, 1 when the engine could not start or died for good."""
    started = time.monotonic()
    gc.disable()  # what is imported stays: looking through it again and again takes a tenth of the time
    log_config = log_config_from_namespace(namespace)
    set_up(log_config.log_level.upper(), log_config.log_format)
    engine_config, server_config = engine_config_from_namespace(namespace), server_config_from_namespace(namespace)
    chat_config = chat_config_from_namespace(namespace)
    tls = listen.tls_context(server_config)
    listen.allow_many_connections()
    listener = listen.bind(server_config)
    try:
        serving = Serving(engine_config, server_config, chat_config, log_config, listener, tls, started)
        return asyncio.run(serving.run())
    finally:
        gc.enable()
        listen.close(server_config, listener)


async def call_in_thread(function: Callable[[], Any]) -> Any:
    """``function()`` in a daemon thread, so that a download does not hold up the exit (an executor's thread would)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the waiting with it
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="octavo-resolve", daemon=True).start()
    return await future


class Serving:
    """One server process: HTTP and the engine side by side on one event loop."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        chat: ChatConfig,
        log: LogConfig,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        started: float,
    ) -> None:
        from octavo.entrypoints.server.state import ServedModel, ServerState

        self.engine_config, self.server_config = engine, server
        self.listener, self.tls, self.started = listener, tls, started
        self.url = listen.url_of(server, listener)
        name = engine.model.served_model_name or engine.model.model
        local = listen.is_on_loopback(server, listener)
        self.model: ServedModel = ServedModel(name, chat_config=chat)
        self.state: ServerState = ServerState([self.model], config=server, log_config=log, only_local=local)
        self._http: uvicorn.Server | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopping = False
        self._tenants = read_tenants(engine.queue.tenants) if engine.queue.tenants is not None else None

    def _make_http(self) -> uvicorn.Server:
        """The HTTP server, not yet serving. Its imports take a third of a second: run it beside the engine's start."""
        import uvicorn

        from octavo.entrypoints.api.shared.errors import OPENAI
        from octavo.entrypoints.app import build_app
        from octavo.entrypoints.http.connection import timed_protocol

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are Serving's

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                for one in sockets or ():
                    one.listen(listen.BACKLOG)  # asyncio has made it as short as what it accepts at once

        config = uvicorn.Config(
            build_app(self.state),
            http=timed_protocol(
                OPENAI,
                self.server_config.request_timeout,
                self.server_config.slow_client_timeout,
                listen.max_connections(),
            ),
            backlog=listen.ACCEPTS,
            h11_max_incomplete_event_size=self.server_config.h11_max_incomplete_event_size,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=bool(self.server_config.forwarded_allow_ips),
            forwarded_allow_ips=list(self.server_config.forwarded_allow_ips),
            headers=[("x-content-type-options", "nosniff")],
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(GRACE),
        )
        config.load()
        config.ssl = self.tls
        return Server(config)

    async def run(self) -> int:
        """Serve until a signal or a failed start; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        files = (self.server_config.api_key_file, self.engine_config.queue.tenants, self.tls)
        if any(one is not None for one in files):
            loop.add_signal_handler(signal.SIGHUP, self._on_reload)  # else a closed terminal ends the server
        if listen.is_reachable_from_elsewhere(self.server_config, self.listener) and not self.state.keys.guarded:
            logger.warning("whoever can reach %s may use this server; --api-key-file sets keys", self.url)
        if not 0 <= (most := self.engine_config.sampling.max_logprobs) <= MANY_LOGPROBS:
            logger.warning("--max-logprobs %d: one request for so many delays the tokens of all others", most)
        announce(f"octavo listens on {self.url}, loading {self.model.name}")
        self._starting = asyncio.create_task(self._start_engine())
        http: uvicorn.Server = await call_in_thread(self._make_http)
        gc.enable()
        self._http, http.should_exit = http, self._stopping
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
        await asyncio.wait({serving, self._starting}, return_when=asyncio.FIRST_COMPLETED)
        failed = self._failure()
        if failed is not None:
            complain(f"octavo serve: {failed}")
            http.should_exit = True
        await serving
        self._starting.cancel()
        if self._draining is not None:
            self._draining.cancel()
        await asyncio.gather(*(t for t in (self._starting, self._draining) if t), return_exceptions=True)
        if self.model.engine is not None:
            await self.model.engine.shutdown(now=http.force_exit)
        return 1 if failed is not None else 0

    def _failure(self) -> str | None:
        """Why there is no engine, in a line; None if there is one, or will be, or was told to stop."""
        assert self._starting is not None
        if not self._starting.done() or self._starting.cancelled():
            return None
        error = self._starting.exception()
        if error is None:
            return None
        if not isinstance(error, OctavoError):
            logger.error("the engine failed", exc_info=error)
        self.model.failure = str(error) or repr(error)
        return self.model.failure

    def _on_signal(self) -> None:
        """The first signal drains, the second one stops."""
        if self._stopping:
            if self._http is not None:
                self._http.should_exit = self._http.force_exit = True
            return
        self._stopping = True
        if self.model.engine is None:
            assert self._starting is not None
            self._starting.cancel()
            if self._http is not None:
                self._http.should_exit = True
        else:
            left = f"{self.model.engine.num_active} answers, within {self.server_config.shutdown_timeout:g} s"
            announce(f"octavo finishes what it has begun ({left}); a second signal stops at once")
            self._draining = asyncio.create_task(self._drain(self.model.engine))

    async def _drain(self, engine: AsyncLLM) -> None:
        """Answer those who come with 503 until what runs has ended; then stop listening."""
        self.state.draining = True
        try:
            await engine.shutdown(self.server_config.shutdown_timeout)
        finally:
            if self._http is not None:
                self._http.should_exit = True

    def _on_reload(self) -> None:
        """Read keys, tenants and certificate again; what cannot be read stays as it was."""
        self.state.keys.reload()
        self._reload_tenants()
        if self.tls is not None:
            try:
                listen.load_certificate(self.server_config, self.tls)
                logger.info("certificate read from %s", self.server_config.ssl_certfile)
            except ConfigError as error:
                logger.error("the certificate stays as it was: %s", error)

    def _reload_tenants(self) -> None:
        path = self.engine_config.queue.tenants
        if path is None:
            return
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise ConfigError(f"tenants = {path!r}: no regular file, so it cannot be read again")
            self._tenants = read_tenants(path)
        except ConfigError as error:
            logger.error("the tenants stay as they were: %s", error)
            return
        if self.model.engine is not None:
            self.model.engine.set_tenants(self._tenants)
        logger.info("%d tenants read from %s", len(self._tenants.listed), path)

    async def _start_engine(self) -> None:
        """Fetch, load, and open the doors. Raises ConfigError or ModelError then, EngineDeadError whenever."""
        from octavo.args.resolve import resolve_engine_config
        from octavo.engine.async_llm import AsyncLLM
        from octavo.entrypoints.chat.chat_format import ChatFormats
        from octavo.entrypoints.sampling_defaults import read_sampling_defaults
        from octavo.entrypoints.server.state import fingerprint
        from octavo.entrypoints.terminal import download_bar

        def resolve() -> EngineConfig:
            with download_bar() as bar:

                def progress(name: str, done: int, total: int) -> None:
                    self.model.phase, self.model.progress = f"fetch {name}", done / total if total else None
                    bar(name, done, total)

                return resolve_engine_config(self.engine_config, progress)

        self.model.phase = "find the model"
        config: EngineConfig = await call_in_thread(resolve)
        creating = asyncio.create_task(AsyncLLM.create(config, self._on_phase, tenants=self._tenants))
        try:  # meanwhile
            defaults = await asyncio.to_thread(read_sampling_defaults, config.model.model, config.sampling)
        except BaseException:
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            raise
        engine = await creating
        try:
            self.model.chat_formats = await call_in_thread(
                lambda: ChatFormats(engine.tokenizer, self.model.chat_config)
            )
        except BaseException:
            await engine.shutdown()
            raise
        self.model.sampling_defaults = defaults
        self.model.system_fingerprint = fingerprint(config, engine.info)
        gc.freeze()  # what a server is made of: to look through it takes 50 ms, in which every stream would wait
        self.model.engine, self.model.phase = engine, "ready"
        if self._tenants is not None:
            engine.set_tenants(self._tenants)  # the file may have been read again meanwhile
        seconds = time.monotonic() - self.started
        announce_facts("octavo is ready", start_screen(config, self.model, self.url, seconds))
        raise await engine.gone()

    def _on_phase(self, name: str) -> None:
        self.model.phase, self.model.progress = name, None


def start_screen(config: EngineConfig, model: ServedModel, url: str, seconds: float) -> list[tuple[str, str]]:
    """All there is to know about a ready server, in a screen: (name, fact)."""
    import octavo
    from octavo.utils.units import format_bytes

    assert model.engine is not None
    info, cache = model.engine.info, config.cache
    blocks = info.num_blocks - 1  # block 0 is the null block
    caching = "prefix caching" if cache.enable_prefix_caching else "no prefix caching"
    return [
        ("version", octavo.__version__),
        ("model", f"{model.name} ({config.model.model})"),
        *info.facts.items(),
        ("context", f"{info.max_model_len} tokens, {config.scheduler.max_num_seqs} requests a step"),
        (
            "KV cache",
            f"{blocks} blocks of {info.block_size} = "
            f"{blocks // info.num_kv_groups * info.block_size} tokens, "
            f"{format_bytes(info.kv_cache_bytes)}, {caching}",
        ),
        ("start-up", ", ".join(f"{name} {spent:.2f} s" for name, spent in info.phases) + f"; {seconds:.2f} s in all"),
        ("address", f"{url}/v1"),
    ]
