"""Media types of an `Accept` header (RFC 9110, section 12.5.1); wildcards are left to the caller's default."""

from __future__ import annotations

from starlette.requests import Request


def accepted_types(request: Request) -> list[str]:
    """Return the media types of `Accept` in lower case, by descending `q`, equal ones in the header's order.

    Types with `q=0` are left out: the client refuses them. A weight that is no number counts as 1.
    """
    weights = {}
    for entry in ",".join(request.headers.getlist("accept")).split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        weights[kind] = next((_number(value) for value in parameters if value.startswith("q=")), 1.0)
    return sorted((kind for kind, weight in weights.items() if kind and weight > 0), key=lambda kind: -weights[kind])


def _number(parameter: str) -> float:
    try:
        return float(parameter.removeprefix("q="))
    except ValueError:
        return 1.0
