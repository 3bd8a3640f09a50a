"""Says whether a constraint makes sense before the request is admitted: in another process, for a bounded time.

Knows nothing of llguidance but that it may hang or crash; see ``check_process``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import msgspec

from octavo.config import StructuredOutputsConfig
from octavo.exceptions import OverloadedError, RequestError, ValidationError
from octavo.messages import StructuredOutputsParams
from octavo.structured_output.cache import LruCache
from octavo.structured_output.check_process import LENGTH_BYTES, Setup, Verdict, frame
from octavo.structured_output.vocabulary import special_tokens
from octavo.tokenizer.base import Tokenizer

MAX_PROCESSES = 2  # so that a hostile grammar does not keep all others waiting for its time to run out
MAX_VERDICTS = 512
MAX_VERDICT_CHARACTERS = 16 << 20
START_SECONDS = 30.0  # of the process, before its clock runs
QUEUE_SECONDS = 60.0
NICE = 10

BOOTSTRAP = (
    f"import os; os.nice({NICE}); import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from octavo.structured_output.check_process import main; main()"
)


class _Crashed(Exception):
    """The process ended; the number of the signal, or None."""

    def __init__(self, signal: int | None) -> None:
        super().__init__(signal)
        self.signal = signal


class _CheckProcess:
    """One helper, used by one thread at a time."""

    def __init__(self, setup: Setup) -> None:
        command = [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._kill = weakref.finalize(self, _end, self._process)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._send(msgspec.msgpack.encode(setup))
        self._used = False

    @property
    def _stdout(self):  # type: ignore[no-untyped-def]
        return self._process.stdout

    def _send(self, data: bytes) -> None:
        stream, view = self._process.stdin, memoryview(frame(data))
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # reading says why
            while view:
                view = view[stream.write(view) :]

    def ask(self, data: bytes, timeout: float) -> Verdict:
        """Raises TimeoutError, after which the process is of no more use, or _Crashed."""
        deadline = time.monotonic() + timeout + (0.0 if self._used else START_SECONDS)
        self._send(data)
        size = int.from_bytes(self._read(LENGTH_BYTES, deadline), "little")
        verdict = msgspec.msgpack.decode(self._read(size, deadline), type=Verdict)
        self._used = True
        return verdict

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = self._stdout.read(size - len(data))
            if not part:
                code = self._process.wait()
                raise _Crashed(-code if code < 0 else None)
            data += part
        return data

    def kill(self) -> None:
        """End the process, from any thread: a question under way raises _Crashed."""
        self._process.kill()

    def end(self) -> None:
        """Free everything. No question may be under way."""
        self._selector.close()
        self._kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()


class GrammarChecker:
    """Thread-safe. Processes start with the first constraint and live until :meth:`close`.

    ``vocab_size`` is the width of the logits.
    """

    def __init__(self, config: StructuredOutputsConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._config, self._tokenizer, self._vocab_size = config, tokenizer, vocab_size
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_PROCESSES)
        self._idle: list[_CheckProcess] = []
        self._all: weakref.WeakSet[_CheckProcess] = weakref.WeakSet()
        self._closed = False
        self._verdicts: LruCache[bytes, Verdict] = LruCache(
            MAX_VERDICTS, MAX_VERDICT_CHARACTERS, lambda _, verdict: len(verdict.grammar or verdict.message)
        )

    def known(self, params: StructuredOutputsParams) -> bool:
        """Whether :meth:`check` answers at once."""
        with self._lock:
            return self._verdicts.get(_key(_encoded(self._completed(params)))) is not None

    def check(self, params: StructuredOutputsParams) -> str:
        """The grammar of ``params``, as the engine core wants it. May wait for a process, and for its verdict.

        Raises ValidationError naming the field if it makes no sense, is too large, or takes more than the configured
        time to compile; OverloadedError if there are too many others to check.
        """
        params = self._completed(params)
        data = _encoded(params)
        self._check_size(params, len(data))
        key = _key(data)
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._ask(params, data)
            with self._lock:
                self._verdicts.put(key, verdict)
        if verdict.grammar is None:
            raise ValidationError(verdict.message, parameter=verdict.parameter)
        return verdict.grammar

    def close(self) -> None:
        """End the processes; idempotent. Checks that still run end with an error."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._all:
                process.kill()
        for process in idle:
            process.end()

    def _completed(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """``params`` with the server's defaults."""
        config = self._config
        return msgspec.structs.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or config.disable_any_whitespace,
            disable_additional_properties=params.disable_additional_properties or config.disable_additional_properties,
        )

    def _check_size(self, params: StructuredOutputsParams, size: int) -> None:
        field, limit = f"structured_outputs.{params.kind}", self._config.max_grammar_bytes
        if size > limit:
            message = f"{field} has {size} bytes; at most {limit} are accepted (max_grammar_bytes)"
            raise ValidationError(message, parameter=field, value=size)
        if not self._tokenizer.eos_token_ids:
            raise ValidationError("structured_outputs needs a model with an EOS token", parameter="structured_outputs")

    def _ask(self, params: StructuredOutputsParams, data: bytes) -> Verdict:
        field, timeout = f"structured_outputs.{params.kind}", self._config.grammar_timeout
        try:
            with self._process() as process:
                return process.ask(data, timeout)
        except TimeoutError:
            message = f"{field} takes more than {timeout:g} s to compile (grammar_timeout); make it simpler"
        except _Crashed as crash:
            if crash.signal is None or self._closed:
                raise RequestError("the process that checks grammars failed") from crash
            message = f"{field} takes too much memory or nests too deeply to compile; make it simpler"
        return Verdict(message=message, parameter=field)

    @contextlib.contextmanager
    def _process(self) -> Iterator[_CheckProcess]:
        """A process for one question. One that did not answer is ended, and another one takes its place later."""
        if not self._free.acquire(timeout=QUEUE_SECONDS):
            message = "too many grammars are waiting to be checked; try again later"
            raise OverloadedError(message, reason="grammars", retry_after=QUEUE_SECONDS)
        process = None
        try:
            with self._lock:
                if self._closed:
                    raise RequestError("the engine is shut down")
                process = self._idle.pop() if self._idle else None
            if process is None:
                process = _CheckProcess(self._setup())
                self._all.add(process)
            yield process
            with self._lock:
                if not self._closed:
                    self._idle.append(process)
                    process = None
        finally:
            if process is not None:
                process.end()
            self._free.release()

    def _setup(self) -> Setup:
        tokenizer = self._tokenizer
        special = special_tokens(tokenizer)
        return Setup(special, list(tokenizer.eos_token_ids), self._vocab_size, self._config.grammar_timeout)


def _encoded(params: StructuredOutputsParams) -> bytes:
    try:
        json.dumps([params.json, params.structural_tag])  # refuses bytes and odd keys, which MessagePack takes
        return msgspec.msgpack.encode(params)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        field = f"structured_outputs.{params.kind}"
        raise ValidationError(f"{field} is not JSON: {error}", parameter=field) from None


def _key(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
