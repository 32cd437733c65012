"""Locations of checkpoints: a local directory, a folder behind a URL, or a model of the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.hub import pinned, snapshot_of
from rayserve_moe.checkpoints.range_cache import cache_for
from rayserve_moe.checkpoints.remote import AnyDirectory, AnyFile, FolderStore, RemoteDirectory, folder_at
from rayserve_moe.checkpoints.transfer import MissingFileError, attempted
from rayserve_moe.config.given_files import ANYWHERE, GivenFileError, Reach, is_url, one_line
from rayserve_moe.config.model_names import HubModel, hub_model


def place_of(path: str | Path, reach: Reach = ANYWHERE, *, cache: Path | None = None) -> AnyDirectory:
    """Return the directory that a path names; reads of a remote directory are cached below the folder `cache`.

    A model of the Hub is resolved to a commit, or to its snapshot if the Hub's cache has all of it. Raises
    CheckpointError for a URL or model that does not exist or cannot be reached; a local directory is not checked.
    """
    text = str(path)
    if not reach.covers(text):
        raise CheckpointError(f"{text}: lies outside of weight_roots")
    try:
        if isinstance(path, str) and (model := hub_model(text)):
            return _hub_place(model, reach, cache)
        if is_url(text):
            return folder_at(text, cache_for(text, cache) if cache else None)
    except GivenFileError as error:
        raise CheckpointError(one_line(f"{text}: {error}")) from error
    return Path(path)


def exists(file: AnyFile, reach: Reach = ANYWHERE) -> bool:
    """Return True if the file exists. Raises CheckpointError if a remote store cannot be reached."""
    if isinstance(file, Path):
        return os.path.lexists(file)
    try:
        file.parent.stamp(file.name, reach)
    except MissingFileError:
        return False
    except GivenFileError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return True


def check_directory(place: AnyDirectory, reach: Reach, *, holds: str) -> None:
    """Raise CheckpointError unless the directory exists; a remote directory exists if it has the file `holds`."""
    try:
        if isinstance(place, RemoteDirectory):
            if not exists(place / holds, reach):
                store = place.store
                if isinstance(store, FolderStore):
                    attempted(store.check_bucket, given_up=reach.given_up)
                raise CheckpointError(f"{place}: no such checkpoint directory: {holds} does not exist (404)")
        elif not place.is_dir():
            raise CheckpointError(f"{place}: no such checkpoint directory")
    except OSError as error:
        raise CheckpointError(f"{place}: not readable: {error.strerror}") from error
    except GivenFileError as error:
        raise CheckpointError(f"{place}: {error}") from error


def one_revision(path: str, reach: Reach = ANYWHERE) -> str:
    """Return the same path for all hosts of a group: a model of the Hub at its commit, anything else unchanged.

    Raises CheckpointError if the Hub does not know it, or cannot be reached and its cache has no complete snapshot.
    """
    if not reach.covers(path):
        raise CheckpointError(f"{path}: lies outside of weight_roots")
    try:
        model = hub_model(path)
        return str(pinned(model, reach.given_up)[0]) if model else path
    except GivenFileError as error:
        raise CheckpointError(one_line(f"{path}: {error}")) from error


def _hub_place(model: HubModel, reach: Reach, cache: Path | None) -> AnyDirectory:
    if model.is_commit and (snapshot := snapshot_of(model)):
        return snapshot
    commit, store = pinned(model, reach.given_up)
    if (snapshot := snapshot_of(commit)) or store is None:
        assert snapshot, "without the Hub a snapshot exists"
        return snapshot
    return RemoteDirectory(str(commit), store, cache_for(str(commit), cache) if cache else None)
