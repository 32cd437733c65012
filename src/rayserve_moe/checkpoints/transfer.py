"""Calls to an object store or the Hub: tried again while the cause may pass, refused in one line where it will not.

The libraries of stores share no base class of errors, so causes are distinguished by status and type.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rayserve_moe.config.given_files import GivenFileError, one_line

T = TypeVar("T")

NUM_ATTEMPTS = 6
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
"""Waits double from the first to the longest: 15.5 s in all, and up to a quarter more, so that hosts spread out."""
TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
MEANINGS = {
    401: "not authorised (401): the credentials are missing or have expired",
    403: "access is forbidden (403): the account or token may not read it",
    404: "does not exist (404)",
    416: "truncated: it ends before the range that was asked for (416)",
}
CREDENTIALS = "no usable Google credentials (set GOOGLE_APPLICATION_CREDENTIALS, or use a service account)"
_PERMANENT = (NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Cause:
    """Why a call failed, on one line; `is_transient` where the same call may succeed later."""

    text: str
    is_transient: bool = False
    is_missing: bool = False


class MissingFileError(GivenFileError):
    """There is nothing under the name."""


def attempted(call: Callable[[], T], *, given_up: threading.Event) -> T:
    """Return what `call` returns, tried up to NUM_ATTEMPTS times.

    MissingFileError where there is nothing, GivenFileError with any other cause, and once `given_up` is set.
    """
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:  # stores raise what they like
            cause = cause_of(error)
            if cause.is_missing:
                raise MissingFileError(cause.text) from error
            if not cause.is_transient:
                raise GivenFileError(cause.text) from error
            if attempt == NUM_ATTEMPTS:
                raise GivenFileError(f"{cause.text}, at each of {NUM_ATTEMPTS} attempts") from error
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1))
        if given_up.wait(wait_s * random.uniform(1.0, 1.25)):
            break
    raise GivenFileError("reading was given up")


def cause_of(error: BaseException) -> Cause:
    """Say what an error of a store's library means."""
    status = status_of(error)
    if isinstance(error, GivenFileError):
        return Cause(str(error))
    if type(error).__module__.startswith("google.auth"):
        return Cause(f"{CREDENTIALS}: {_said(error)}")
    if status in TRANSIENT_STATUSES:
        return Cause(f"the server answers {status}", is_transient=True)
    if status is not None and 400 <= status < 500:
        # What it says beside may hold an address that is signed.
        return Cause(MEANINGS.get(status, f"the server answers {status}"), is_missing=status == 404)
    if isinstance(error, FileNotFoundError):
        # The HTTP file system says so of whatever kept it from learning the size.
        return Cause(MEANINGS[404], is_missing=True) if error.__cause__ is None else cause_of(error.__cause__)
    if isinstance(error, PermissionError) or "forbidden" in str(error)[:200].lower():
        return Cause(MEANINGS[403])
    if isinstance(error, ImportError):
        return Cause(f"a library is missing: {_said(error)}")
    if isinstance(error, _PERMANENT):
        return Cause(_said(error))
    return Cause(f"cannot be reached: {_said(error)}", is_transient=True)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error carries, if it does."""
    found: Any = getattr(error, "status", None) or getattr(error, "code", None)
    found = found or getattr(getattr(error, "response", None), "status_code", None)
    found = int(found) if isinstance(found, str) and found.isdigit() else found
    return found if type(found) is int else None


def _said(error: BaseException) -> str:
    return one_line(" ".join(str(error).split())) or type(error).__name__
