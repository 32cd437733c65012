"""Texts to ids with a memory: what lies between special tokens is encoded once, and a long chat costs its last turn.

A tokenizer separates a text at its added tokens before anything else, so that the pieces are encoded apart in any case.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict

import numpy as np

from rayserve_moe.text.tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 24
"""Of all remembered pieces together."""
_PIECE_COST = 64


class SegmentEncoder:
    """Encodes as `Tokenizer.encode` does. It may be shared by threads."""

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
        """Turn text into ids, int32, with the tokenizer's own leading or trailing special tokens where it has such."""
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
            while self._size > MOST_CHARACTERS:
                oldest, _ = self._known.popitem(last=False)
                self._size -= len(oldest) + _PIECE_COST
        return ids
