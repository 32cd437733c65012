"""Models of the Hugging Face Hub: files at a commit, by byte ranges, or the snapshot in the Hub's cache."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers

from rayserve_moe.checkpoints.remote import OPTIONS, RemoteStamp
from rayserve_moe.checkpoints.transfer import attempted
from rayserve_moe.config.given_files import GivenFileError
from rayserve_moe.config.model_names import HubModel

log = logging.getLogger(__name__)

LOCATION_S = 900.0
"""Seconds for which a file's redirected address is used; the Hub signs it for an hour."""


def pinned(model: HubModel, given_up: threading.Event | None = None) -> tuple[HubModel, HubStore | None]:
    """Return the model at its revision's current commit, and its store; no store if the Hub is not used.

    Raises GivenFileError if the Hub cannot be reached and its cache has no complete snapshot.
    """
    try:
        found = attempted(lambda: _model_info(model), given_up=given_up or threading.Event())
    except GivenFileError as error:
        snapshot = snapshot_of(model)
        if snapshot is None:
            raise
        log.warning("%s is read from the Hub's cache: %s", model, error)
        return HubModel(model.repo_id, snapshot.name), None
    stamps = {file.rfilename: RemoteStamp(file.size or 0, str(file.blob_id)) for file in found.siblings or ()}
    commit = HubModel(model.repo_id, found.sha)
    return commit, HubStore(commit, stamps)


def snapshot_of(model: HubModel) -> Path | None:
    """Return the model's directory in the Hub's cache on this host, or None unless it has all weights."""
    try:
        found = huggingface_hub.snapshot_download(model.repo_id, revision=model.revision, local_files_only=True)
    except (LocalEntryNotFoundError, FileNotFoundError, ValueError):
        return None
    return Path(found) if _is_whole(Path(found)) else None


def _model_info(model: HubModel) -> Any:
    try:
        return huggingface_hub.HfApi().model_info(model.repo_id, revision=model.revision, files_metadata=True)
    except OfflineModeIsEnabled as error:
        raise GivenFileError("no such directory, and not in the Hub's cache while HF_HUB_OFFLINE is set") from error
    except GatedRepoError as error:
        raise GivenFileError("gated on the Hub: accept its terms there, and set HF_TOKEN (403)") from error
    except RepositoryNotFoundError as error:
        raise GivenFileError("no such directory, and no such model on the Hub that HF_TOKEN may see (404)") from error
    except RevisionNotFoundError as error:
        raise GivenFileError(f"the model has no revision {model.revision} on the Hub (404)") from error


def _is_whole(directory: Path) -> bool:
    """Return True if every file that the index lists exists, or the single weight file."""
    index = directory / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return (directory / "config.json").exists() and all((directory / str(name)).exists() for name in names)


@dataclass
class HubStore:
    """The files of a model at a commit.

    The Hub is asked once per file for the address of its bytes, because it limits requests; ranges are read from there.
    """

    model: HubModel
    stamps: dict[str, RemoteStamp]
    _locations: dict[str, tuple[str, float]] = field(default_factory=dict)

    def stamp(self, name: str) -> RemoteStamp:
        if name not in self.stamps:
            raise FileNotFoundError(name)
        return self.stamps[name]

    def read(self, name: str, *, start: int, end: int) -> bytes:
        location = self._location(name)
        is_own = location.startswith(f"{huggingface_hub.constants.ENDPOINT}/")
        system = fsspec.filesystem("https", **OPTIONS["https"])
        headers = build_hf_headers() if is_own else {}
        with ExitStack() as undo:
            # After any failure another address may work.
            undo.callback(self._locations.pop, name, None)
            content = system.cat_file(location, start=start, end=end, headers=headers)
            undo.pop_all()
        return content

    def _location(self, name: str) -> str:
        location, until = self._locations.get(name, ("", 0.0))
        if time.monotonic() > until:
            repo_id, commit = self.model.repo_id, self.model.revision
            url = huggingface_hub.hf_hub_url(repo_id, name, revision=commit)
            location = huggingface_hub.get_hf_file_metadata(url).location
            self._locations[name] = location, time.monotonic() + LOCATION_S
        return location
