"""Messages between a replica's page feed and its readers: frames of msgpack, between ends that know one key."""

from __future__ import annotations

import asyncio
import hmac
import secrets

import msgpack

from rayserve_moe.cluster.handshake import HANDSHAKE_S, NONCE_BYTES, PROOF_BYTES, proof_of
from rayserve_moe.fleet.load_average import Load, Report
from rayserve_moe.fleet.page_log import PageMessage

LONGEST_FRAME = 1 << 24
_LENGTH_BYTES = 4


class WireError(ConnectionError):
    """The other end does not know the key, or sends something else."""


def frame(message: PageMessage | Report) -> bytes:
    """Return the bytes of a message."""
    packed = msgpack.packb(list(message), use_bin_type=True)
    return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


async def read_frame(reader: asyncio.StreamReader) -> PageMessage | Report:
    """Read a message. EOFError where the connection has ended, WireError."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if length > LONGEST_FRAME:
        raise WireError(f"a frame of {length} bytes")
    fields = msgpack.unpackb(await reader.readexactly(length), raw=False, strict_map_key=False)
    if len(fields) == len(Report._fields):
        load, num_requests = fields
        return Report(Load(*load), num_requests)
    epoch, first, num_to_come, events = fields
    return PageMessage(epoch, first, num_to_come, tuple((kind, rank, body) for kind, rank, body in events))


async def prove_listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes) -> None:
    """Have a reader prove that it knows the key, and prove it in return. WireError, EOFError, TimeoutError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce)
    async with asyncio.timeout(HANDSHAKE_S):
        received = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
    nonces = nonce + received[:NONCE_BYTES]
    if not hmac.compare_digest(received[NONCE_BYTES:], proof_of(key, b"connecting", nonces=nonces)):
        raise WireError("a reader does not know the key")
    writer.write(proof_of(key, b"listening", nonces=nonces))


async def prove_connecting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes) -> None:
    """Prove to a feed that this end knows the key, and have it prove it too. WireError, EOFError, TimeoutError."""
    async with asyncio.timeout(HANDSHAKE_S):
        nonces = await reader.readexactly(NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
        writer.write(nonces[NONCE_BYTES:] + proof_of(key, b"connecting", nonces=nonces))
        proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, proof_of(key, b"listening", nonces=nonces)):
        raise WireError("what listens there does not know the key")
