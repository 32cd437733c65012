"""Small rank files, and tiktoken's own encodings of them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from rayserve_moe.text.token_forms import ByteLevelForm

KIMI, MOONLIGHT = "tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer"
HUNYUAN = "tokenization_hy.HYTokenizer"
KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As the tokenizer code of Kimi-K2 and Moonlight has it."""
HUNYUAN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As the tokenizer code of Hunyuan-A13B has it."""
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As published files have it."""
CORPUS = [
    "the cat sat on the mat, and the HTTPServer of the cat's house DON'T say that they'll sit there",
    "getHTTPResponseCode(request, 12345) == 200 and isn't XMLHttpRequest",
    "\r\n\r\n\t\tdef the_cat(self):\n    return 3.14  # as said\n\n",
    "中文English混合 漢字テスト 北京市 Pascal 你好。世界你好世界 日本語のテキストです 한국어 한국어는",
    "été à l'école, Ünïcode ὀξεῖα ДОМ дом ДОМ — “quotes” … 👩\u200d👩\u200d👧 שלום مرحبا e\u0301",
]
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|tool_call|>", 255: "[PAD]"}
"""Special tokens of Kimi's kind, by their place among the special ids."""


@cache
def trained_tokens(num_merges: int = 400) -> tuple[bytes, ...]:
    """Return 256 bytes, the tokens of a trained BPE, and words that merges never reach."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS * 3, trainer)
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return *(ByteLevelForm().token_bytes(token) for token, _ in by_id), b" qzxw", "漢漢字".encode()


def rank_lines(tokens: Sequence[bytes]) -> bytes:
    """Return the content of a tiktoken file."""
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))


def write_tiktoken(directory: Path, code: str, *, num_merges: int = 400, **more: Any) -> Path:
    """Write a checkpoint's rank file and the configuration beside it."""
    directory.mkdir(exist_ok=True)
    tokens = trained_tokens(num_merges)
    config: dict[str, Any] = {"tokenizer_class": code.partition(".")[2], "auto_map": {"AutoTokenizer": [code, None]}}
    if code == HUNYUAN:
        config |= {"eos_token": "<|eos|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|extra_0|>"]}
    else:
        config |= {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
        config |= {"additional_special_tokens": ["<|im_end|>"]}
        config["added_tokens_decoder"] = {
            str(len(tokens) + place): {"content": name, "special": name != "<|tool_call|>"}
            for place, name in NAMED.items()
        }
    file = directory / ("hy.tiktoken" if code == HUNYUAN else "tiktoken.model")
    file.write_bytes(rank_lines(tokens))
    (directory / "tokenizer_config.json").write_text(json.dumps(config | more))
    return directory


def tiktoken_encoding(code: str, *, num_merges: int = 400) -> tiktoken.Encoding:
    """Return the encoding that a checkpoint's tokenizer code makes of the file of `write_tiktoken`."""
    tokens = trained_tokens(num_merges)
    if code == HUNYUAN:
        names = ["endoftext", "startoftext", "bos", "eos", "pad", *(f"extra_{number}" for number in range(205))]
        special = {f"<|{name}|>": len(tokens) + place for place, name in enumerate(names)}
        return encoding(tokens, HUNYUAN_PATTERN, special=special)
    ids = range(len(tokens), len(tokens) + 256)
    special = {NAMED.get(place, f"<|reserved_token_{ids[place]}|>"): ids[place] for place in range(256)}
    return encoding(tokens, KIMI_PATTERN, special=special)


def encoding(tokens: Sequence[bytes], pattern: str, *, special: Mapping[str, int]) -> tiktoken.Encoding:
    """Return tiktoken's encoding of tokens by rank."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(special))


def tekken_content(*, num_special: int = 30, unused: int = 7, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the content of a `tekken.json` whose last `unused` ranks lie beyond its vocabulary."""
    tokens = trained_tokens()
    entries = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None} for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) - unused + num_special,
        "default_num_special_tokens": num_special,
        "version": "v3" if names is None else "v11",
    }
    listed = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names or ())]
    return {"config": config, "vocab": entries} | ({} if names is None else {"special_tokens": listed})


def write_tekken(directory: Path, content: Mapping[str, Any]) -> Path:
    """Write a `tekken.json` alone."""
    directory.mkdir(exist_ok=True)
    (directory / "tekken.json").write_text(json.dumps(content))
    return directory
