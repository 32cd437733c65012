"""The page of HTTP routes, written from the application by `python -m tests.architecture.endpoints_page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from rayserve_moe.serving.openapi import MEANINGS
from rayserve_moe.serving.purposes import GROUPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "endpoints.md"
INTRODUCTION = """# Endpoints

Written from the application's own description (`GET /openapi.json`) by `python -m tests.architecture.endpoints_page`.
What every field of a body does: [http_fields.md](http_fields.md). Numbers behind `/metrics`: [metrics.md](metrics.md).
A running server shows this reference with all fields at `/docs`.

Pages are open and hold no data: their scripts request it, with the key that a user types. `GET /` answers HTML where
`Accept` names `text/html`, as browsers do, and otherwise a JSON object with the paths of pages, description and chat. A
page has an `ETag`, and is answered 304 while it is unchanged.
"""


def page() -> str:
    """Return the page's text."""
    paths = create_api(ApiState(loop=None, tokenizer=None)).openapi()["paths"]
    unlisted = set(paths) ^ {path for group in GROUPS.values() for path in group}
    assert not unlisted, f"tell in GROUPS what these routes are for, or take them out: {sorted(unlisted)}"
    parts = [INTRODUCTION]
    for title, group in GROUPS.items():
        rows = [_row(path, paths[path], purpose) for path, purpose in group.items()]
        parts += [f"## {title}", "", "| route | for | body | answers | refusals |", "|---|---|---|---|---|", *rows, ""]
    parts += ["## Refusals", "", "| status | |", "|---|---|"]
    parts += [f"| {status} | {meaning} |" for status, meaning in sorted(MEANINGS.items())]
    return "\n".join([*parts, ""])


def _row(path: str, methods: dict[str, Any], purpose: str) -> str:
    operation = next(iter(methods.values()))
    answers = operation["responses"]
    kinds = ", ".join(f"`{kind}`" for kind in answers.get("200", {}).get("content", {}))
    refusals = ", ".join(sorted(status for status in answers if status != "200"))
    said = " ".join(method.upper() for method in sorted(methods))
    cells = (f"`{said} {path}`", purpose, _body(operation), "" if "501" in answers else kinds, refusals)
    return "| " + " | ".join(cells) + " |"


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return ", ".join(f"`{kind['schema']['$ref'].rpartition('/')[2]}`" for kind in content.values())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
