"""How many bytes of text a single token can stand for, where that has a limit."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
_MAY_REMOVE = {"Split", "Punctuation"}


def longest_token_bytes(backing: PreTrainedTokenizerFast, token_bytes: Iterable[bytes]) -> int | None:
    """Bytes of the longest token; None where bytes of a text can lie in no token, or in one of unbounded length.

    That is so where words may be unknown, where the pre-tokenizer removes what it splits at, and where an added token
    takes the blanks around it along.
    """
    fast, added = backing.backend_tokenizer, backing.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if _falls_back(fast):
        return max(len(token.encode("utf-8", "replace")) for token in backing.get_vocab())
    needed = set(pre_tokenizers.ByteLevel.alphabet()) - _never_left(fast, added)
    has_every_byte = isinstance(fast.model, models.BPE) and all(fast.token_to_id(one) is not None for one in needed)
    steps = [] if fast.pre_tokenizer is None else list(_steps(json.loads(fast.pre_tokenizer.__getstate__())))
    is_spelled_in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not (has_every_byte and is_spelled_in_bytes and all(map(_keeps_everything, steps))):
        return None
    return max(map(len, (*token_bytes, *(token.content.encode("utf-8", "replace") for token in added))))


def _falls_back(fast: Tokenizer) -> bool:
    """Return True if byte fallback covers every byte of a normalized text."""
    if not isinstance(fast.model, models.BPE) or not fast.model.byte_fallback:
        return False
    steps = [] if fast.pre_tokenizer is None else _steps(json.loads(fast.pre_tokenizer.__getstate__()))
    has_every_byte = all(fast.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return has_every_byte and all(map(_keeps_everything, steps))


def _never_left(fast: Tokenizer, added: Collection[AddedToken]) -> set[str]:
    """Characters of the byte alphabet whose bytes added tokens take out of every text before the model meets it."""
    if fast.normalizer is not None or fast.encode_special_tokens or any(token.single_word for token in added):
        return set()
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return {word for token in added for word, _ in spelled(token.content) if len(word) == 1}


def _steps(described: dict) -> Iterator[dict]:
    """The steps of a pre-tokenizer, in order."""
    if described["type"] != "Sequence":
        yield described
    for step in described.get("pretokenizers", ()):
        yield from _steps(step)


def _keeps_everything(step: dict) -> bool:
    return step["type"] in _KEEPS_ALL or (step["type"] in _MAY_REMOVE and step["behavior"] != "Removed")
