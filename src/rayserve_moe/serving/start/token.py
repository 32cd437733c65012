"""The token by which Ray's processes and clients know each other, in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rayserve_moe.serving.start.ports import StartError


def ensure_token(path: Path) -> None:
    """Make the token, if there is none, and close its file to everybody else.

    StartError where the file is somebody else's or holds nothing: Ray would start without protection.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    if not path.exists():
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # another start may have made one meanwhile: then that is the token
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    if path.stat().st_uid != os.getuid():
        raise StartError(f"{path}: the token of Ray belongs to another user")
    path.chmod(0o600)
    if not path.read_text(encoding="utf-8").strip():
        raise StartError(f"{path}: the token of Ray is empty; remove the file, and one is made")
