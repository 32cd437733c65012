"""Forms of published tokenizers: the bytes of a vocabulary entry, their maximum, and incremental decoding to text.

The decoder in `tokenizer.json` selects the form. Decoded pieces join to the tokenizers library's decoding of all ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
TokenBytes = Callable[[int], bytes]
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
_MAY_REMOVE = {"Split", "Punctuation"}


class TextDecoder(Protocol):
    """Incremental decoder of one text."""

    def extend(self, token_ids: Iterable[int]) -> str:
        """Decode the next ids and return the text that later ids cannot change."""
        ...

    def flush(self) -> str:
        """End the text and return the held-back rest."""
        ...


class TokenForm(Protocol):
    """Interface of a tokenizer form."""

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that a vocabulary entry adds inside a text."""
        ...

    def decoder(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], continues: bool) -> TextDecoder:
        """Return a decoder of a text; if it `continues` another text, leading spaces stay.

        Each id in `byte_ids` adds a single byte.
        """
        ...


class UnknownFormError(ValueError):
    """Error for an unsupported decoder."""


def form_of(decoder: decoders.Decoder | None) -> TokenForm:
    """Return the form that a decoder belongs to.

    Raises: UnknownFormError with the decoder's step types.
    """
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
    """Return the steps of a decoder in order."""
    if described["type"] != "Sequence":
        return [dict(described)]
    return [step for inner in described["decoders"] for step in _steps(inner)]


def spelling_of(token: bytes) -> str:
    """Return a token in the byte-level alphabet, a character for each byte."""
    return token.decode("latin-1").translate(_CHARACTER_OF)


class ByteLevelForm:
    """Byte-level form: an alphabet of 256 characters, one per byte (GPT-2, converted tiktoken files)."""

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes by the alphabet, or the UTF-8 of an entry with other characters."""
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode("utf-8", "replace")

    def decoder(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], continues: bool) -> TextDecoder:
        """Return a UTF-8 decoder; `continues` changes nothing."""
        return _BytesDecoder(token_bytes)


@dataclass(frozen=True)
class ByteFallbackForm:
    """SentencePiece form: text with `space` in place of spaces, and byte tokens `<0x00>` to `<0xFF>`.

    If a run of byte tokens is not valid UTF-8, every byte of the run decodes to U+FFFD. The decoder removes up to
    `num_stripped` leading spaces, because the tokenizer adds a space before a text.
    """

    space: str
    num_stripped: int

    def token_bytes(self, token: str) -> bytes:
        """Return the byte of a byte token, or the UTF-8 of the text."""
        value = byte_of(token)
        return token.replace(self.space, " ").encode("utf-8", "replace") if value is None else bytes([value])

    def decoder(self, token_bytes: TokenBytes, *, byte_ids: frozenset[int], continues: bool) -> TextDecoder:
        """Return a decoder that holds back runs of byte tokens."""
        return _FallbackDecoder(token_bytes, byte_ids=byte_ids, num_stripped=0 if continues else self.num_stripped)


def byte_of(token: str) -> int | None:
    """Return the byte of a token such as `<0xAB>`, or None for other tokens."""
    found = _BYTE_TOKEN.fullmatch(token)
    return None if found is None else int(found[1], 16)


class _BytesDecoder:
    """UTF-8 decoder that holds back incomplete characters."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def extend(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _FallbackDecoder:
    """Decoder that holds back a run of byte tokens, because a later byte may invalidate the run."""

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
        """Remove leading spaces of the whole text, up to the remaining number."""
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
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def max_token_bytes(backing: PreTrainedTokenizerFast, token_bytes: Iterable[bytes]) -> int | None:
    """Return the maximum bytes per token, or None if text bytes can lie outside tokens or a token has no bound.

    The latter holds if words may be unknown, if the pre-tokenizer removes its separators, or if an added token absorbs
    the whitespace around it.
    """
    fast, added = backing.backend_tokenizer, backing.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if _falls_back(fast):
        return max(len(token.encode("utf-8", "replace")) for token in backing.get_vocab())
    needed = set(pre_tokenizers.ByteLevel.alphabet()) - _never_left(fast, added)
    has_every_byte = isinstance(fast.model, models.BPE) and all(fast.token_to_id(one) is not None for one in needed)
    steps = (
        [] if fast.pre_tokenizer is None else list(_pre_tokenizer_steps(json.loads(fast.pre_tokenizer.__getstate__())))
    )
    is_spelled_in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not (has_every_byte and is_spelled_in_bytes and all(map(_keeps_everything, steps))):
        return None
    return max(map(len, (*token_bytes, *(token.content.encode("utf-8", "replace") for token in added))))


def _falls_back(fast: Tokenizer) -> bool:
    """Return True if byte fallback covers every byte of a normalized text."""
    if not isinstance(fast.model, models.BPE) or not fast.model.byte_fallback:
        return False
    steps = [] if fast.pre_tokenizer is None else _pre_tokenizer_steps(json.loads(fast.pre_tokenizer.__getstate__()))
    has_every_byte = all(fast.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return has_every_byte and all(map(_keeps_everything, steps))


def _never_left(fast: Tokenizer, added: Collection[AddedToken]) -> set[str]:
    """Return byte-level characters whose bytes added tokens remove from every text before the model sees it."""
    if fast.normalizer is not None or fast.encode_special_tokens or any(token.single_word for token in added):
        return set()
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return {word for token in added for word, _ in spelled(token.content) if len(word) == 1}


def _pre_tokenizer_steps(described: dict) -> Iterator[dict]:
    """Yield the steps of a pre-tokenizer in order."""
    if described["type"] != "Sequence":
        yield described
    for step in described.get("pretokenizers", ()):
        yield from _pre_tokenizer_steps(step)


def _keeps_everything(step: dict) -> bool:
    return step["type"] in _KEEPS_ALL or (step["type"] in _MAY_REMOVE and step["behavior"] != "Removed")
