"""The wheel in an empty environment: contents, seconds to install and to the first answer, sizes.

    python -m benchmarks.wheel dist/rayserve_moe-*.whl [--out benchmarks/results/wheel.json]

The environment is new and has no access to the source tree. pip installs as it is configured on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import free_port, is_healthy
from benchmarks.start import ask

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PACKAGE = Path("src"), "rayserve_moe"
BUILT = f"{PACKAGE}/kernels/cpu_native/built/"
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
MODEL = "trained:calculator"
LIMIT_S = 900.0


def expected_files(tracked: Iterable[str]) -> set[str]:
    """Return the package's files of a wheel: those under version control, without the pages for contributors."""
    files = {Path(name) for name in tracked}
    return {
        file.relative_to(SOURCE).as_posix() for file in files if file.parts[0] == "src" and file.name != "README.md"
    }


def wrong_files(names: Iterable[str], expected: set[str]) -> tuple[set[str], set[str]]:
    """Return the files that a wheel lacks, and those that it should not hold.

    Args: names: paths in the wheel; compiled kernels are permitted. expected: paths of the package's files.
    """
    found = {name for name in names if not name.endswith("/")}
    about = {name for name in found if name.split("/")[0].endswith(".dist-info")}
    inside = {name.partition("/")[2] for name in about}
    package = {name for name in found - about if not (name.startswith(BUILT) and name.endswith(".so"))}
    return (expected - package) | (METADATA - inside), (package - expected) | (inside - METADATA)


def contents(wheel: Path) -> dict[str, Any]:
    """Return the numbers of files and bytes of a wheel.

    Raises: SystemExit if a file is missing from it, or does not belong in it.
    """
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        missing, unexpected = wrong_files(archive.namelist(), expected_files(listed.split()))
        unpacked = sum(entry.file_size for entry in archive.infolist())
        kernels = sum(entry.file_size for entry in archive.infolist() if entry.filename.startswith(BUILT))
        count = len(archive.namelist())
    if missing or unexpected:
        raise SystemExit(f"{wheel.name}: missing {sorted(missing)}, unexpected {sorted(unexpected)}")
    return {"wheel_bytes": wheel.stat().st_size, "unpacked_bytes": unpacked, "kernel_bytes": kernels, "files": count}


def installed(wheel: Path, folder: Path) -> dict[str, float]:
    """Install a wheel into a new environment in `folder`; return the seconds and the environment's bytes."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    begun = time.monotonic()
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", str(wheel)]
    subprocess.run(command, check=True, cwd=folder)
    seconds = time.monotonic() - begun
    size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return {"install_s": seconds, "environment_bytes": size}


def first_answer(folder: Path, cache: Path) -> float:
    """Serve the calculator from an environment; return the seconds from the command to the first answer.

    Raises: RuntimeError if the server ends before it is healthy, or takes longer than LIMIT_S, or answers wrongly.
    """
    port, log = free_port(), folder / "serve.log"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    command = [folder / "bin" / "rayserve-moe", "serve", MODEL, "--port", str(port)]
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not is_healthy(port):
            if child.poll() is not None or time.monotonic() - begun > LIMIT_S:
                raise RuntimeError("the server did not start:\n" + log.read_text(encoding="utf-8")[-3000:])
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as response:
            name = json.load(response)["data"][0]["id"]
        answer, seconds = ask(port, name), time.monotonic() - begun
        if answer.strip() != "82":
            raise RuntimeError(f"the server answered 37+45= with {answer!r}")
        return seconds
    finally:
        child.send_signal(signal.SIGINT)
        child.wait()


def wheel(measured: Mapping[str, Any]) -> str:
    """Return a table with one figure per row."""
    rows = [
        ["size of the wheel, MB", f"{measured['wheel_bytes'] / 1e6:.1f}"],
        ["of it compiled kernels, unpacked, MB", f"{measured['kernel_bytes'] / 1e6:.1f}"],
        ["files", f"{measured['files']:,}"],
        ["environment with all dependencies, MB", f"{measured['environment_bytes'] / 1e6:,.0f}"],
        ["`pip install`, s", f"{measured['install_s']:.0f}"],
        ["first start to the first answer, s", f"{measured['first_answer_s'][0]:.0f}"],
        ["second start to the first answer, s", f"{measured['first_answer_s'][1]:.0f}"],
    ]
    return markdown_table(["", "measured"], rows)


def main() -> None:
    """Check, install, serve twice, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--contents-only", action="store_true", help="check what the wheel holds, install nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "wheel.json")
    arguments = parser.parse_args()
    load_before, measured = load_before_start(), contents(arguments.wheel)
    note(f"{arguments.wheel.name}: {measured['files']} files, {measured['wheel_bytes']:,} bytes, all as expected")
    if arguments.contents_only:
        return
    folder = Path(tempfile.mkdtemp(prefix="wheel-"))
    try:
        measured |= installed(arguments.wheel.resolve(), folder / "environment")
        note(f"installed in {measured['install_s']:.0f} s")
        measured["first_answer_s"] = [first_answer(folder / "environment", folder / "cache") for _ in range(2)]
    finally:
        shutil.rmtree(folder)
    save({"wheel_machine": machine_facts(load_before), "wheel": measured}, arguments.out)
    print(wheel(measured))


if __name__ == "__main__":
    main()
