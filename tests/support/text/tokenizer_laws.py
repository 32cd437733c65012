"""Laws of tokenizers: encoding and streamed decoding agree with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rayserve_moe.text.tokenizer import IncrementalDetokenizer, SegmentEncoder, Tokenizer

PIECES = [
    *("the cat ", "Hello, ", "don't ", "x = [1, 2]; ", "été ", "e\u0301", "Å", "ﬁ", "日本語", "한국어"),
    *(
        "\u1112\u1161\u11ab",
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "👋🏽",
        "שלום ",
        "مرحبا ",
        "\u202eabc\u202c",
        "\r\n",
        "\n\n",
        "\t",
    ),
    *("\0", "\u0085", "\u2028", "\ufeff", "\ufffd", " ", "  ", " " * 50, "1234567", "3.14"),
    *("<|im_start|>", "<tool_call>", "</s>", "[INST]", "<0x41>", "\u2581", "Ġ"),
]


def texts(count: int, *, seed: int) -> Iterator[str]:
    """Yield random texts of words, scripts, spaces, controls, and names of special tokens."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        chosen = generator.choice(len(PIECES), generator.integers(0, 12))
        others = [chr(code) for code in generator.integers(0x20, 0x3000, generator.integers(0, 4)).tolist()]
        parts = [*(PIECES[place] for place in chosen), *others]
        generator.shuffle(parts)
        yield "".join(parts)


def streamed(tokenizer: Tokenizer, ids: list[int], *, cuts: list[int], skips: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=None if skips else frozenset())
    begins, ends = [0, *cuts], [*cuts, len(ids)]
    pieces = [detokenizer.extend(ids[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return "".join(pieces) + detokenizer.flush()


def random_cuts(generator: np.random.Generator, length: int) -> list[int]:
    return sorted(generator.integers(0, length + 1, generator.integers(0, 5)).tolist())


def hold_texts(tokenizer: Tokenizer, *, count: int) -> None:
    """Check that random texts are encoded, whole and in segments, and streamed at random cuts as transformers does."""
    generator, segments = np.random.default_rng(1), SegmentEncoder(tokenizer)
    for text in texts(count, seed=0):
        ids = tokenizer.encode(text)
        assert ids == tokenizer.backing(text).input_ids
        assert segments.encode(text).tolist() == ids
        for skips in (False, True):
            whole = tokenizer.backing.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert streamed(tokenizer, ids, cuts=random_cuts(generator, len(ids)), skips=skips) == whole, (text, ids)


def hold_cuts(tokenizer: Tokenizer, *, count: int) -> None:
    """Check that random texts are streamed as they are decoded, at every cut."""
    for text in texts(count, seed=2):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        assert all(streamed(tokenizer, ids, cuts=[cut], skips=True) == whole for cut in range(len(ids)))


def hold_ids(tokenizer: Tokenizer, *, count: int) -> None:
    """Check random ids: cut characters, invalid bytes, special tokens, and ids without a token."""
    generator = np.random.default_rng(3)
    end_id = tokenizer.vocab_size + 100
    of_bytes = [token_id for token_id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token_id)) == 1]
    for _ in range(count):
        ids = generator.integers(0, end_id, generator.integers(1, 12)).tolist()
        ids += generator.choice(of_bytes, generator.integers(0, 8)).tolist()
        generator.shuffle(ids)
        for skips in (False, True):
            cuts = random_cuts(generator, len(ids))
            whole = tokenizer.decode(ids, skip_special_tokens=skips)
            assert streamed(tokenizer, ids, cuts=cuts, skips=skips) == whole, ids


def hold_lengths(tokenizer: Tokenizer, *, count: int) -> None:
    """Check that a text within a limit of tokens is never rejected by its length."""
    for text in texts(count, seed=4):
        assert not tokenizer.exceeds(len(tokenizer.encode(text, add_special_tokens=False)), text)
    spaces = " " * 10_000
    assert not tokenizer.exceeds(len(tokenizer.encode(spaces)), spaces)
