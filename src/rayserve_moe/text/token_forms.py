"""Forms that published tokenizers have: what a token of the vocabulary writes, and how text comes from tokens.

A form is read from the decoder of `tokenizer.json`. Text is what the tokenizers library makes of all ids at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import decoders

TokenBytes = Callable[[int], bytes]


class TextDecoder(Protocol):
    """Turns the ids of one text into pieces of it, which join to the whole."""

    def extend(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is certain now."""
        ...

    def flush(self) -> str:
        """End the text; return what was held back."""
        ...


class TokenForm(Protocol):
    """How a tokenizer writes its tokens."""

    def token_bytes(self, token: str) -> bytes:
        """Bytes that an entry of the vocabulary writes inside a text."""
        ...

    def decoder(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], continues: bool) -> TextDecoder:
        """A decoder of a text, or of one that `continues` another. Of `byte_ids` each writes a single byte."""
        ...


class UnknownFormError(ValueError):
    """A decoder of a kind that is not read here."""


def form_of(decoder: decoders.Decoder | None) -> TokenForm:
    """Return the form of a tokenizer by its decoder. UnknownFormError names the kinds of one that is not known."""
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelForm()
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace, strip = steps[0], steps[3] if steps[3:] else {"content": " ", "start": 0, "stop": 0}
        space, is_plain = replace["pattern"].get("String"), (strip["content"], strip["stop"]) == (" ", 0)
        if space and replace["content"] == " " and is_plain:
            return ByteFallbackForm(space, strip["start"])
    found = " and ".join(kinds) or "nothing"
    raise UnknownFormError(f"its tokenizer decodes by {found}; only ByteLevel and ByteFallback after Replace are read")


def _steps(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, in order."""
    if described["type"] != "Sequence":
        return [dict(described)]
    return [step for inner in described["decoders"] for step in _steps(inner)]


class ByteLevelForm:
    """Tokens are spelled in an alphabet of 256 characters, one for each byte: GPT-2's, and tiktoken's."""

    def token_bytes(self, token: str) -> bytes:
        """By the alphabet, or as it stands where it uses other characters."""
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode("utf-8", "replace")

    def decoder(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], continues: bool) -> TextDecoder:
        """A text has the same pieces whether it continues another or not."""
        return _BytesDecoder(token_bytes)


@dataclass(frozen=True)
class ByteFallbackForm:
    """SentencePiece's: tokens are text with `space` for spaces, and `<0x00>` to `<0xFF>` write what no token has.

    Where a run of such bytes is not UTF-8, each of its bytes is U+FFFD. A text begins without its first
    `num_stripped` spaces, since the tokenizer adds one in front.
    """

    space: str
    num_stripped: int

    def token_bytes(self, token: str) -> bytes:
        """The byte of a token that is one, else its text."""
        value = byte_of(token)
        return token.replace(self.space, " ").encode("utf-8", "replace") if value is None else bytes([value])

    def decoder(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], continues: bool) -> TextDecoder:
        """A text that continues another keeps the spaces that it begins with."""
        return _FallbackDecoder(token_bytes, byte_ids=byte_ids, num_stripped=0 if continues else self.num_stripped)


def byte_of(token: str) -> int | None:
    """Return the byte that a token of the form `<0xAB>` stands for; None for another one."""
    if len(token.encode()) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


class _BytesDecoder:
    """Holds back bytes that may still become a character until they do, cannot any more, or the text ends."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def extend(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _FallbackDecoder:
    """Holds back a run of single bytes until it ends: what comes may make U+FFFD of all of it."""

    def __init__(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], num_stripped: int) -> None:
        self._token_bytes, self._byte_ids, self._num_stripped = token_bytes, byte_ids, num_stripped
        self._run = b""

    def extend(self, token_ids: Iterable[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            written = self._token_bytes(token_id)
            if token_id in self._byte_ids:
                self._run += written
            elif written:
                pieces += (self._end_run(), written.decode("utf-8", "replace"))
        return self._stripped("".join(pieces))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        """Take off the spaces that a text begins with, as many as are still to go."""
        while self._num_stripped and text:
            if text[0] != " ":
                self._num_stripped = 0
                break
            text, self._num_stripped = text[1:], self._num_stripped - 1
        return text


def _byte_of_character() -> dict[str, int]:
    """Invert the byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
