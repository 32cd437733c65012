"""Kimi-K2's rank file from the package `splintr-rs`: `python -m tests.support.text.kimi_rank_file DIRECTORY`.

The file equals the published file byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from base64 import b64encode
from pathlib import Path

NUM_RANKS, NUM_SPECIAL = 163_584, 256
SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
"""Digest of `tiktoken.model` in the checkpoints of Kimi-K2, K2.5 and K3."""


def main() -> None:
    """Write `tiktoken.model` and `tokenizer_config.json`."""
    directory = Path(sys.argv[1])
    splintr = importlib.import_module("splintr").Tokenizer.from_pretrained("kimi_k2")
    tokens = map(bytes, map(splintr.decode_token_bytes, range(NUM_RANKS)))
    content = b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))
    assert hashlib.sha256(content).hexdigest() == SHA256, "the ranks are the published ones"
    special = splintr.special_tokens() if callable(splintr.special_tokens) else splintr.special_tokens
    named = {
        str(token_id): {"content": name, "special": not name.startswith(("<|tool_call", "<think", "</think"))}
        for name, token_id in dict(special).items()
        if NUM_RANKS <= token_id < NUM_RANKS + NUM_SPECIAL and name != f"<|reserved_token_{token_id}|>"
    }
    config = {
        "added_tokens_decoder": named,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (directory / "tiktoken.model").write_bytes(content)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
