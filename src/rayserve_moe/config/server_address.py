"""Addresses of servers as users write them, for commands that talk to a running server."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
HOW_TO_START = "rayserve-moe serve trained:calculator"
"""A command that starts a server, for messages."""


def server_url(text: str) -> str:
    """Return a server's base URL; `http://` and the host 127.0.0.1 may be left out, as in `:8000`.

    Raises: ValueError if the text is no address of an HTTP server.
    """
    given = f"127.0.0.1{text}" if text.startswith(":") else text
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address:
        raise ValueError(f"--url {text}: not the address of a server, such as {DEFAULT_URL}")
    return url.rstrip("/")


def no_server(url: str) -> str:
    """Return the message for an address that refuses connections."""
    return f"no server at {url}: start one with `{HOW_TO_START}`, or name another with --url"


def untrusted(url: str, error: ssl.SSLCertVerificationError) -> str:
    """Return the message for a certificate that this machine does not trust, or that has another name."""
    return f"{url}: the certificate is not trusted ({error.verify_message}); SSL_CERT_FILE names a file of trusted ones"
