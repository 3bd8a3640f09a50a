"""``import octavo`` is cheap, and its names are there when touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import octavo\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(names - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['octavo']"


def test_sampling_params_alone_load_no_numpy() -> None:
    code = "import sys; from octavo import SamplingParams, RequestOutput; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names() -> None:
    assert octavo.__all__ == ["LLM", "AsyncLLM", "BeamSearchParams", "RequestOutput", "SamplingParams", "__version__"]
    for name in octavo.__all__:
        assert getattr(octavo, name) is getattr(octavo, name)
        assert name in dir(octavo)
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = octavo.Nonsense
