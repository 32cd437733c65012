"""Calls to an object store or the Hub: retried after transient errors, other errors in one line.

The stores' libraries share no base class of errors, so causes are distinguished by status and type.
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
MAX_WAIT_S = 8.0
"""Waits double from the first to the maximum: 15.5 s in total, plus up to a quarter, so that hosts spread out."""
TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
MEANINGS = {
    401: "not authorised (401): the credentials are missing or have expired",
    403: "access is forbidden (403): the account or token may not read it",
    404: "does not exist (404)",
    416: "truncated: it ends before the requested range (416)",
}
CREDENTIALS = "no usable Google credentials (set GOOGLE_APPLICATION_CREDENTIALS, or use a service account)"
_PERMANENT = (NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Cause:
    """The reason why a call failed."""

    text: str
    """A single line."""
    is_transient: bool = False
    """True if the same call may succeed later."""
    is_missing: bool = False


class MissingFileError(GivenFileError):
    """The file does not exist."""


def attempted(call: Callable[[], T], *, given_up: threading.Event) -> T:
    """Call `call` up to NUM_ATTEMPTS times and return its result.

    Raises MissingFileError if the file does not exist, GivenFileError for any other cause, and once `given_up` is set.
    """
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:  # stores raise any exception
            cause = cause_of(error)
            if cause.is_missing:
                raise MissingFileError(cause.text) from error
            if not cause.is_transient:
                raise GivenFileError(cause.text) from error
            if attempt == NUM_ATTEMPTS:
                raise GivenFileError(f"{cause.text}, at each of {NUM_ATTEMPTS} attempts") from error
            wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1))
        if given_up.wait(wait_s * random.uniform(1.0, 1.25)):
            break
    raise GivenFileError("reading was given up")


def cause_of(error: BaseException) -> Cause:
    """Return the cause of an error of a store's library."""
    status = status_of(error)
    if isinstance(error, GivenFileError):
        return Cause(str(error))
    if type(error).__module__.startswith("google.auth"):
        return Cause(f"{CREDENTIALS}: {_said(error)}")
    if status in TRANSIENT_STATUSES:
        return Cause(f"the server answers {status}", is_transient=True)
    if status is not None and 400 <= status < 500:
        # Other text of the error may contain a signed address.
        return Cause(MEANINGS.get(status, f"the server answers {status}"), is_missing=status == 404)
    if isinstance(error, FileNotFoundError):
        # The HTTP file system raises this for any error while it requests the size.
        return Cause(MEANINGS[404], is_missing=True) if error.__cause__ is None else cause_of(error.__cause__)
    if isinstance(error, PermissionError) or "forbidden" in str(error)[:200].lower():
        return Cause(MEANINGS[403])
    if isinstance(error, ImportError):
        return Cause(f"a library is missing: {_said(error)}")
    if isinstance(error, _PERMANENT):
        return Cause(_said(error))
    return Cause(f"cannot be reached: {_said(error)}", is_transient=True)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries, or None."""
    found: Any = getattr(error, "status", None) or getattr(error, "code", None)
    found = found or getattr(getattr(error, "response", None), "status_code", None)
    found = int(found) if isinstance(found, str) and found.isdigit() else found
    return found if type(found) is int else None


def _said(error: BaseException) -> str:
    return one_line(" ".join(str(error).split())) or type(error).__name__
