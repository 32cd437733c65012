"""Models of the Hugging Face Hub: files at one commit, by ranges of bytes, or the snapshot in the Hub's cache."""

from __future__ import annotations

import json
import logging
import re
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

log = logging.getLogger(__name__)

SCHEME = "hf://"
LOCATION_S = 900.0
"""How long the address that the Hub sends a file's readers to is used: it is signed for an hour."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub at a revision; None stands for its newest one."""

    repo_id: str
    revision: str | None = None

    @property
    def is_commit(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo_id}" + (f"@{self.revision}" if self.revision else "")


def hub_model(model_path: str) -> HubModel | None:
    """What a path names on the Hub: `hf://org/name`, or `org/name` where there is no such directory; `@revision` may
    follow. None for any other path. GivenFileError where `hf://` is followed by anything else.
    """
    is_url = model_path.startswith(SCHEME)
    found = _ID.fullmatch(model_path.removeprefix(SCHEME).rstrip("/"))
    if found is None and is_url:
        raise GivenFileError("not a model of the Hub: hf://organisation/name, or hf://organisation/name@revision")
    if found is None or (not is_url and (model_path[0] in ".~" or Path(model_path).exists())):
        return None
    return HubModel(found["id"], found["revision"])


def pinned(model: HubModel, given_up: threading.Event | None = None) -> tuple[HubModel, HubStore | None]:
    """The model at the commit that its revision names now, and its store; no store where the Hub is not to be asked.

    GivenFileError where it cannot be asked and the Hub's cache has no whole snapshot either.
    """
    try:
        found = attempted(lambda: _asked(model), given_up=given_up or threading.Event())
    except GivenFileError as error:
        snapshot = snapshot_of(model)
        if snapshot is None:
            raise
        log.warning("%s is taken from the Hub's cache: %s", model, error)
        return HubModel(model.repo_id, snapshot.name), None
    stamps = {file.rfilename: RemoteStamp(file.size or 0, str(file.blob_id)) for file in found.siblings or ()}
    commit = HubModel(model.repo_id, found.sha)
    return commit, HubStore(commit, stamps)


def snapshot_of(model: HubModel) -> Path | None:
    """The model's directory in the Hub's cache on this host, where it has all weights."""
    try:
        found = huggingface_hub.snapshot_download(model.repo_id, revision=model.revision, local_files_only=True)
    except (LocalEntryNotFoundError, FileNotFoundError, ValueError):
        return None
    return Path(found) if _is_whole(Path(found)) else None


def _asked(model: HubModel) -> Any:
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
    """Whether every file that the index lists is there, or the single one."""
    index = directory / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return (directory / "config.json").exists() and all((directory / str(name)).exists() for name in names)


@dataclass
class HubStore:
    """The files of a model at a commit.

    The Hub is asked once per file where its bytes lie, and ranges are read from there: it bounds how often it is asked.
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
            # Whatever fails, another address may do.
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
