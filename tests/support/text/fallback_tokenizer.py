"""Tokenizers in published forms, at small size."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
TEXTS = ["the cat", "hello world", "den Tag", "été", "日本"]


def write_fallback_tokenizer(directory: Path, *, adds_space: bool = True) -> None:
    """Write a tokenizer of SentencePiece's form, as Mixtral has it: bytes for what has no token, U+2581 for spaces.

    With `adds_space` one is put in front of a text, and taken off when it is decoded.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    pieces += sorted(
        {one for text in TEXTS for one in text if one not in " 日"} | set('abcdefghijklmnopqrstuvwxyz.{}":')
    )
    merges = [
        ("t", "h"),
        ("th", "e"),
        (SPACE, "the"),
        (SPACE, SPACE),
        ("l", "l"),
        ("e", "ll"),
        ("h", "ell"),
        (SPACE, "w"),
    ]
    pieces += ["".join(pair) for pair in merges]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaced = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaced]) if adds_space else spaced
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    backing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    backing.chat_template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    backing.save_pretrained(directory)
    assert json.loads((directory / "tokenizer.json").read_text())["model"]["byte_fallback"]
