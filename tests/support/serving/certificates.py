"""A certificate for 127.0.0.1 that signs itself, and its key, as files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def write_certificate(folder: Path, name: str = "own", *, password: bytes = b"") -> tuple[Path, Path]:
    """Write `NAME.crt` and `NAME.key`; return their paths. With a password the key is encrypted."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}.crt", folder / f"{name}.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    traditional = serialization.PrivateFormat.TraditionalOpenSSL
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, traditional, encryption))
    return files
