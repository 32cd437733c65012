"""A model with a large vocabulary that writes JSON of a schema as real ones do: for the cost of structured output.

Its tokenizer is trained on made-up words and such documents. The model is one of two-token statistics: its layers add
nothing, every token that the documents use has an embedding of its own direction, and the head holds the logarithms of
how often a token follows another, and below that, of how often it occurs. Other tokens have no chance of note, and are
followed by what occurs.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.checkpoints.synthetic_tokenizer import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, PAD_TOKEN

NUM_IDS = 131_072
HIDDEN = 512
NUM_WORDS, NUM_KNOWN = 160_000, 90
SURE = 40.0
LENGTH = HIDDEN**0.5
"""Of a normed vector with one number that is not 0."""
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "city": {"type": "string"},
            "kind": {"enum": ["person", "company", "place"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": "string"},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "city", "kind", "tags", "note", "active"],
        "additionalProperties": False,
    },
}
"""A list that does not end within a measurement."""


def made_up_words() -> list[str]:
    """Return distinct words of syllables, the same ones every time."""
    generator, found = random.Random(0), {}
    syllables = [a + b + c for a in "bcdfghjklmnprstvwz" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    while len(found) < NUM_WORDS:
        found["".join(generator.choices(syllables, k=generator.randint(1, 4)))] = None
    return list(found)


def documents(words: list[str], count: int) -> Iterator[str]:
    """Return lists of SCHEMA, made of a few of the words."""
    generator, known = random.Random(1), words[:NUM_KNOWN]
    for _ in range(count):
        some = [
            {
                "name": " ".join(word.capitalize() for word in generator.choices(known, k=2)),
                "age": generator.randint(1, 99),
                "city": generator.choice(known).capitalize(),
                "kind": generator.choice(["person", "company", "place"]),
                "tags": generator.choices(known, k=generator.randint(1, 3)),
                "note": " ".join(generator.choices(known, k=generator.randint(3, 12))),
                "active": generator.random() < 0.5,
            }
            for _ in range(4)
        ]
        yield json.dumps(some)


def trained_tokenizer(words: list[str]) -> Tokenizer:
    """Return a byte-level tokenizer of NUM_IDS ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_IDS,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words), *documents(words, 2000)], trainer)
    return tokenizer


def write_typical(directory: Path, *, is_random: bool) -> Path:
    """Write a checkpoint that writes documents, or any tokens alike; with the same tokenizer."""
    config = replace(PRESETS["tiny"], vocab_size=NUM_IDS, hidden_size=HIDDEN, num_hidden_layers=2)
    path = write_checkpoint(directory, config, dtype="bfloat16")
    words = made_up_words()
    tokenizer = trained_tokenizer(words)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(path)
    if not is_random:
        _teach(path, [tokenizer.encode(text).ids for text in documents(words, 2000)])
    return path


def _teach(path: Path, documents_ids: list[list[int]]) -> None:
    weights = load_file(path / "model.safetensors")
    follows = Counter(pair for ids in documents_ids for pair in pairwise(ids))
    used = {token_id: place for place, token_id in enumerate(sorted({one for pair in follows for one in pair}))}
    assert len(used) < HIDDEN, f"{len(used)} tokens are used"
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    embedding, head = (np.zeros_like(weights[name]) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    embedding[:, -1] = 1  # what the documents do not use
    for token_id, place in used.items():
        embedding[token_id, -1], embedding[token_id, place] = 0, 1
    before, after = Counter(), Counter()
    for (one, other), count in follows.items():
        before[one] += count
        after[other] += count
    for other, count in after.items():
        head[other] = (SURE / 2 + np.log(count / after.total())) / LENGTH
    for (one, other), count in follows.items():
        head[other, used[one]] = (SURE + np.log(count / before[one])) / LENGTH
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
