"""Tokenizer of a checkpoint: text to ids and back, whole or incrementally, and the bytes of each id."""

from __future__ import annotations

import re
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from rayserve_moe.config.given_files import GivenFileError, one_line, opened, read_json_object
from rayserve_moe.text.rank_files import CONFIG_FILE, RANK_FILES, code_named, ranked_backing, read_rank_file
from rayserve_moe.text.token_forms import (
    TextDecoder,
    TokenBytes,
    UnknownFormError,
    byte_of,
    form_of,
    max_token_bytes,
)

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKEN_ID = (1 << 31) - 1
MAX_CHARACTERS = 1 << 24
"""Maximum length of all pieces that a `SegmentEncoder` remembers."""
_PIECE_COST = 64


class TokenizerError(ValueError):
    """Error for a tokenizer that cannot be loaded or has an unsupported form."""


class TextTooLongError(ValueError):
    """Error for a text that exceeds a token limit under any tokenization."""


class Tokenizer:
    """Tokenizer of a checkpoint directory, in a form of `token_forms`; it fetches nothing.

    It may be shared by threads; others run while one of them encodes.
    """

    def __init__(self, directory: str | Path) -> None:
        """Load the tokenizer.

        Raises: TokenizerError if it is missing or has an unsupported form.
        """
        self.directory = Path(directory)
        self.backing = _load(self.directory)
        self.special_ids = frozenset(self.backing.all_special_ids) | _special_added_ids(self.backing)
        self.eos_token_ids = _eos_token_ids(self.backing, self.directory)
        self._fast = self.backing.backend_tokenizer
        try:
            self._form = form_of(self._fast.decoder)
        except UnknownFormError as error:
            raise TokenizerError(f"{self.directory}: {error}") from error
        vocabulary = self.backing.get_vocab()
        self._bytes_by_id = {token_id: self._form.token_bytes(token) for token, token_id in vocabulary.items()}
        self._byte_ids = frozenset(token_id for token, token_id in vocabulary.items() if byte_of(token) is not None)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._max_token_bytes = max_token_bytes(self.backing, self._bytes_by_id.values())

    @property
    def vocab_size(self) -> int:
        """Return the number of known ids, including added tokens."""
        return len(self.backing)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text, with the tokenizer's own leading and trailing special tokens by default.

        Raises: TextTooLongError, before tokenization, if the text has too many bytes for `max_tokens` tokens.
        """
        if max_tokens is not None and self.exceeds(max_tokens, text):
            raise TextTooLongError(f"the text has more than {max_tokens} tokens")
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Return the ids of a text and the first character of each; 0 for added special tokens."""
        encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def exceeds(self, num_tokens: int, text: str) -> bool:
        """Return True if the length of `text` proves that it has more than `num_tokens` tokens; False proves nothing.

        Every byte of the normalized text lies in a token, and no token has more bytes than the vocabulary's longest.
        Added tokens (a leading space, special tokens) only increase the count.
        """
        if self._max_token_bytes is None:
            return False
        max_bytes = num_tokens * self._max_token_bytes
        if 4 * len(text) <= max_bytes or len(text.encode("utf-8", "replace")) <= max_bytes:
            return False
        normalizer = self._fast.normalizer
        return normalizer is None or len(normalizer.normalize_str(text).encode("utf-8", "replace")) > max_bytes

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Invalid UTF-8 becomes U+FFFD; unknown ids are skipped."""
        decoded = self.backing.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id adds to the output, with special tokens spelled out; empty for an unknown id."""
        return self._bytes_by_id.get(token_id, b"")

    def is_byte(self, token_id: int) -> bool:
        """Return True if an id is a byte token such as `<0xAB>`, whose text is held back until its run ends."""
        return token_id in self._byte_ids

    def decoder(self, token_bytes: TokenBytes, *, continues: bool) -> TextDecoder:
        """Return a decoder of ids to text; a text that `continues` another keeps its leading spaces."""
        return self._form.decoder(token_bytes, byte_ids=self._byte_ids, continues=continues)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single id; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class IncrementalDetokenizer:
    """Incremental decoder of an output. Its pieces concatenate to `Tokenizer.decode` of all ids.

    It holds back text that later ids may change. The cost per token does not depend on the number of earlier tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hidden_ids: Set[int] | None = None,
        characters: Mapping[int, str] | None = None,
        continues: bool = False,
    ) -> None:
        """Begin an output; if it `continues` a prompt, its leading space stays.

        `hidden_ids` add no text (None: all special ids). `characters` replace some of them in the text.
        """
        hidden = dict.fromkeys(tokenizer.special_ids if hidden_ids is None else hidden_ids, b"")
        hidden |= {token_id: text.encode() for token_id, text in (characters or {}).items()}
        written = tokenizer.token_bytes

        def token_bytes(token_id: int) -> bytes:
            return hidden[token_id] if token_id in hidden else written(token_id)

        self._decoder = tokenizer.decoder(token_bytes, continues=continues)

    def push(self, token_id: int) -> str:
        """Take the next id and return the characters that it completes; may be empty."""
        return self._decoder.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and return the same text as pushing each of them."""
        return self._decoder.extend(token_ids)

    def flush(self) -> str:
        """End the output and return the held-back rest; an unfinished character becomes U+FFFD."""
        return self._decoder.flush()


def _load(directory: Path) -> PreTrainedTokenizerFast:
    # Without these files transformers would build an empty tokenizer from config.json alone.
    file = next((directory / name for name in (TOKENIZER_FILE, *RANK_FILES) if (directory / name).exists()), None)
    if file is None:
        raise TokenizerError(
            f"{directory}: {TOKENIZER_FILE} is missing, and so are {', '.join(RANK_FILES)}. A SentencePiece "
            "tokenizer.model is not read; save_pretrained of transformers makes a tokenizer.json of it"
        )
    for file_read in {file, *directory.glob("*.json"), *directory.glob("*.jinja")}:
        _check_opens(file_read)
    try:
        backing = _backing_of(file)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise TokenizerError(one_line(f"{directory}: no usable tokenizer: {error}")) from error
    if not isinstance(backing, PreTrainedTokenizerFast):
        raise TokenizerError(f"{directory}: {type(backing).__name__} is not a tokenizer of the tokenizers library")
    return backing


def _backing_of(file: Path) -> Any:
    """Return the tokenizer of a `tokenizer.json` or a rank file. Code of the checkpoint is never run."""
    directory, config_file = file.parent, file.parent / CONFIG_FILE
    try:
        config = read_json_object(config_file) if config_file.exists() else {}
    except GivenFileError as error:
        if file.name in RANK_FILES:
            raise GivenFileError(f"{CONFIG_FILE}: {error}") from error
        config = {}  # transformers accepts it
    if file.name in RANK_FILES:
        return ranked_backing(read_rank_file(file, config), directory, config=config)
    if code_named(config) is not None:
        # transformers would take a class from the checkpoint's code, which is never run.
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    return AutoTokenizer.from_pretrained(
        directory, config=_config_of(directory), local_files_only=True, trust_remote_code=False
    )


def _config_of(directory: Path) -> PreTrainedConfig | None:
    """Return a config with only the model type, by which transformers selects a tokenizer class; None if it is unknown.

    A full config is not parsed: transformers would reject values that do not concern the tokenizer.
    """
    try:
        config = read_json_object(directory / "config.json", allows_infinity=True)
    except GivenFileError:
        return None
    kind, named = config.get("model_type"), config.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    if not isinstance(named, str):
        return AutoConfig.for_model(kind, name_or_path=str(directory))
    return AutoConfig.for_model(kind, name_or_path=str(directory), tokenizer_class=named)


def _check_opens(file: Path) -> None:
    """Check that a file can be opened without blocking.

    Raises: TokenizerError if it cannot.
    """
    try:
        with opened(file):
            pass
    except GivenFileError as error:
        raise TokenizerError(f"{file}: {error}") from error


def _special_added_ids(backing: PreTrainedTokenizerFast) -> frozenset[int]:
    return frozenset(token_id for token_id, token in backing.added_tokens_decoder.items() if token.special)


def _eos_token_ids(backing: PreTrainedTokenizerFast, directory: Path) -> tuple[int, ...]:
    """Return the tokenizer's end-of-sequence id, then the additional ids of `generation_config.json`, ascending."""
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
    if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKEN_ID for token_id in listed):
        raise TokenizerError(f"{file}: eos_token_id must be an id or a list of ids, not {reprlib.repr(listed)}")
    return listed


class SegmentEncoder:
    """Encoder that caches the text between special tokens, so that a long chat costs only its last turn.

    It returns the same ids as `Tokenizer.encode`, which splits a text at added tokens first. It is thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backing.added_tokens_decoder
        self._id_of = {str(token): token_id for token_id, token in added.items()}
        takes_more = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        fast = tokenizer.backing.backend_tokenizer
        looks_back = fast.normalizer is not None or "Metaspace" in str(fast.pre_tokenizer)
        separates = bool(added) and not takes_more and not looks_back
        names = sorted(map(re.escape, self._id_of), key=len, reverse=True)
        self._borders = re.compile(f"({'|'.join(names)})") if separates else None
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return the ids of a text, int32, with the tokenizer's own special tokens by default."""
        if self._borders is None:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), np.int32)
        pieces = [self._piece(piece) for piece in self._borders.split(text) if piece]
        ids = np.concatenate([np.zeros(0, np.int32), *pieces])
        if not add_special_tokens:
            return ids
        around = self._tokenizer.encode("", add_special_tokens=True)
        return ids if not around else np.asarray(self._tokenizer.encode(text), np.int32)

    def _piece(self, piece: str) -> np.ndarray:
        if (special := self._id_of.get(piece)) is not None:
            return np.array([special], np.int32)
        with self._lock:
            if (known := self._known.get(piece)) is not None:
                self._known.move_to_end(piece)
                return known
        ids = np.asarray(self._tokenizer.encode(piece, add_special_tokens=False), np.int32)
        with self._lock:
            if piece not in self._known:
                self._known[piece] = ids
                self._size += len(piece) + _PIECE_COST
            while self._size > MAX_CHARACTERS:
                oldest, _ = self._known.popitem(last=False)
                self._size -= len(oldest) + _PIECE_COST
        return ids
