"""The checkpoint's tokenizer: text to ids and back, whole or incrementally, and the bytes of each id."""

from __future__ import annotations

import codecs
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import decoders
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from rayserve_moe.config.given_files import GivenFileError, one_line, opened, read_json_object
from rayserve_moe.text.token_length import longest_token_bytes

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKEN_ID = (1 << 31) - 1


class TokenizerError(ValueError):
    """A checkpoint whose tokenizer cannot be loaded or is of a kind this build does not decode."""


class TextTooLongError(ValueError):
    """A text that has more tokens than it may, however it is tokenized."""


class Tokenizer:
    """A byte-level tokenizer read from a checkpoint directory; nothing is fetched from elsewhere.

    It may be shared by threads; others run while one of them encodes.
    """

    def __init__(self, directory: str | Path) -> None:
        """Load it. TokenizerError where there is none, or its decoder is not byte-level."""
        self.directory = Path(directory)
        self.backing = _load(self.directory)
        self.special_ids = frozenset(self.backing.all_special_ids) | _special_added_ids(self.backing)
        self.eos_token_ids = _eos_token_ids(self.backing, self.directory)
        self._bytes_by_id = {token_id: _bytes_of(token) for token, token_id in self.backing.get_vocab().items()}
        self._fast = self.backing.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._longest_bytes = longest_token_bytes(self.backing, self._bytes_by_id.values())

    @property
    def vocab_size(self) -> int:
        """Number of ids that stand for something, added tokens included."""
        return len(self.backing)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Turn text into ids, with the tokenizer's own leading or trailing special tokens where it has such.

        TextTooLongError, before any work, where no `max_tokens` tokens can hold so many bytes.
        """
        if max_tokens is not None and self.exceeds(max_tokens, text):
            raise TextTooLongError(f"the text has more than {max_tokens} tokens")
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def exceeds(self, num_tokens: int, text: str) -> bool:
        """Whether `text` certainly has more than `num_tokens` tokens, judged by its length: False says nothing.

        Every byte of what the normalizer leaves of a text lies in a token, and no token holds more bytes than the
        longest of the vocabulary; what is added (a leading space, special tokens) only makes for more tokens.
        """
        if self._longest_bytes is None:
            return False
        most = num_tokens * self._longest_bytes
        if 4 * len(text) <= most or len(text.encode("utf-8", "replace")) <= most:
            return False
        normalizer = self._fast.normalizer
        return normalizer is None or len(normalizer.normalize_str(text).encode("utf-8", "replace")) > most

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text. Bytes that are not UTF-8 become U+FFFD; ids of no token are passed over."""
        decoded = self.backing.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id adds to the output, special tokens spelled out; empty for an id of no token."""
        return self._bytes_by_id.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """Text of one id on its own; bytes that are not whole characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class IncrementalDetokenizer:
    """Turns the ids of one output into pieces of text whose concatenation is `Tokenizer.decode` of all ids.

    Bytes that may still become a character are held back until they do, cannot any more, or the output ends. The
    cost of a token does not depend on how many came before.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - kept_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next id; return the characters that it completes, perhaps none."""
        return self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> str:
        """Take the next ids at once; returns the text that pushing each of them would."""
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(each) for each in token_ids if each not in skipped))

    def flush(self) -> str:
        """End the output; bytes of an unfinished character come out as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _load(directory: Path) -> PreTrainedTokenizerFast:
    # Without this file transformers would make up an empty tokenizer from config.json alone.
    for file in {directory / TOKENIZER_FILE, *directory.glob("*.json"), *directory.glob("*.jinja")}:
        _check_opens(file)
    try:
        backing = AutoTokenizer.from_pretrained(
            directory, config=_config_of(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises nothing more special
        raise TokenizerError(one_line(f"{directory}: no usable tokenizer: {error}")) from error
    if not isinstance(backing, PreTrainedTokenizerFast):
        raise TokenizerError(f"{directory}: {type(backing).__name__} is not a tokenizer of the tokenizers library")
    decoder = backing.backend_tokenizer.decoder
    if not isinstance(decoder, decoders.ByteLevel):
        raise TokenizerError(
            f"{directory}: its tokenizer decodes by {type(decoder).__name__}; only ByteLevel is supported"
        )
    return backing


def _config_of(directory: Path) -> PreTrainedConfig | None:
    """What transformers chooses a tokenizer by: the type of the model, none of its values; None leaves it to find one.

    Its reader of a whole config refuses values that do not concern a tokenizer, and that other readers take.
    """
    try:
        config = read_json_object(directory / "config.json")
    except GivenFileError:
        return None
    kind, named = config.get("model_type"), config.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    named_class = {"tokenizer_class": named} if isinstance(named, str) else {}
    return AutoConfig.for_model(kind, name_or_path=str(directory), **named_class)


def _check_opens(file: Path) -> None:
    """TokenizerError for a file that cannot be opened at once."""
    try:
        with opened(file):
            pass
    except GivenFileError as error:
        raise TokenizerError(f"{file}: {error}") from error


def _special_added_ids(backing: PreTrainedTokenizerFast) -> frozenset[int]:
    return frozenset(token_id for token_id, token in backing.added_tokens_decoder.items() if token.special)


def _eos_token_ids(backing: PreTrainedTokenizerFast, directory: Path) -> tuple[int, ...]:
    """The tokenizer's end of sequence, then those that `generation_config.json` adds, ascending."""
    own = () if backing.eos_token_id is None else (int(backing.eos_token_id),)
    file = directory / "generation_config.json"
    listed = _listed_eos(file) if file.exists() else []
    return *own, *sorted(set(listed) - set(own))


def _listed_eos(file: Path) -> list[int]:
    try:
        listed: Any = read_json_object(file).get("eos_token_id")
    except GivenFileError as error:
        raise TokenizerError(f"{file}: {error}") from error
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(type(token_id) is int and 0 <= token_id <= MOST_TOKEN_ID for token_id in listed):
        raise TokenizerError(f"{file}: eos_token_id must be an id or a list of ids, not {reprlib.repr(listed)}")
    return listed


def _byte_of_character() -> dict[str, int]:
    """Invert the byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """Spell a vocabulary entry in bytes: by the byte alphabet, or as it stands where it uses other characters."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode("utf-8", "replace")
