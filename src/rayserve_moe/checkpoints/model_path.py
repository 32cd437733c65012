"""Resolution of a configured model path: a directory, a packaged or generated checkpoint, the Hub, or a URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rayserve_moe.checkpoints.files import CheckpointError
from rayserve_moe.checkpoints.places import exists, one_revision, place_of
from rayserve_moe.checkpoints.range_cache import cache_for
from rayserve_moe.checkpoints.remote import NUM_CONNECTIONS, RemoteDirectory, opened_anywhere
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from rayserve_moe.config import given_files
from rayserve_moe.config.given_files import GivenFileError, is_url
from rayserve_moe.config.model_names import SCHEME, SYNTHETIC

SYNTHETIC_PREFIX = f"{SYNTHETIC}:"
TRAINED_PREFIX = f"{given_files.TRAINED}:"
TRAINED = {name: Path(__file__).parent / name for name in given_files.TRAINED_NAMES}
"""Checkpoints in the package, made by `examples/train_calculator.py`."""
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tekken.json",
    "tiktoken.model",
    "hy.tiktoken",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files of a checkpoint besides its weights: config, tokenizer and chat template."""
MAX_SMALL_BYTES = 64 << 20


def resolve_model_path(model_path: str, *, cache_directory: Path) -> Path:
    """Return the directory of `model_path`; write `synthetic:<preset>` under `cache_directory` if it does not exist.

    `trained:<name>` is an entry of `TRAINED`. A plain path is returned without a check that it exists. Raises
    CheckpointError for an unknown preset or name.
    """
    if model_path.startswith(TRAINED_PREFIX):
        name = model_path.removeprefix(TRAINED_PREFIX)
        if name not in TRAINED:
            raise CheckpointError(f"no trained checkpoint {name!r}; known: {', '.join(TRAINED)}")
        return TRAINED[name]
    if model_path.startswith(SYNTHETIC_PREFIX):
        preset = model_path.removeprefix(SYNTHETIC_PREFIX)
        return ensure_checkpoint(cache_directory / "checkpoints" / preset, preset)
    return Path(model_path).expanduser()


def located(model_path: str, *, cache_directory: Path) -> str:
    """Return the location of `model_path` for all hosts of a group: a directory, or a URL.

    Works like `resolve_model_path`; a model of the Hub becomes `hf://organisation/name@commit`. Also raises
    CheckpointError like `places.one_revision`.
    """
    if (place := one_revision(model_path)) != model_path or is_url(place):
        return place
    return str(resolve_model_path(model_path, cache_directory=cache_directory))


def with_small_files(place: str, *, cache_directory: Path) -> Path:
    """Return a local directory with config, tokenizer and chat template of a located checkpoint.

    For a remote checkpoint they are copied under `cache_directory`. Raises CheckpointError if a file cannot be read.
    """
    directory = place_of(place)
    if not isinstance(directory, RemoteDirectory):
        return directory
    folder = cache_for(place, cache_directory / "remote").folder / "small"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        list(pool.map(lambda name: _copy(directory, name, folder=folder), SMALL_FILES))
    return folder


def model_name(place: str) -> str:
    """Return the default name of a located checkpoint: its directory's name, or its id on the Hub."""
    if place.startswith(SCHEME):
        return place.removeprefix(SCHEME).partition("@")[0]
    return place.rstrip("/").rpartition("/")[2]


def _copy(directory: RemoteDirectory, name: str, *, folder: Path) -> None:
    """Copy a file, or remove the copy of a file that no longer exists."""
    file, copy = directory / name, folder / name
    if not exists(file):
        copy.unlink(missing_ok=True)
        return
    try:
        with opened_anywhere(file) as given:
            if given.num_bytes > MAX_SMALL_BYTES:
                raise GivenFileError(f"{given.num_bytes} bytes are more than {MAX_SMALL_BYTES}")
            content = given.read(given.num_bytes)
    except GivenFileError as error:
        raise CheckpointError(f"{file}: {error}") from error
    with suppress(FileNotFoundError):
        if copy.read_bytes() == content:
            return
    partial = folder / f".{name}.{id(content)}"
    partial.write_bytes(content)
    partial.replace(copy)
