"""Certificates for the HTTP clients of tests, none of which connects by TLS."""

from __future__ import annotations

from pathlib import Path

import certifi

_END = "-----END CERTIFICATE-----\n"


def few_certificates(directory: Path) -> dict[str, str]:
    """Environment in which a client reads one certificate, which takes 1 ms, and not 140, which take 17."""
    path = directory / "certificate.pem"
    path.write_text(certifi.contents().partition(_END)[0] + _END, encoding="ascii")
    return {"SSL_CERT_FILE": str(path)}
