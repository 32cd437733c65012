"""Encoding and streamed decoding by published tokenizers equal those of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rayserve_moe.text.segments import SegmentEncoder
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, Tokenizer

pytestmark = pytest.mark.published
FEW_OR_MANY = pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
CUT_EVERYWHERE = pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
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


@FEW_OR_MANY
def test_texts_are_encoded_and_streamed_as_transformers_has_them(published: Tokenizer, count: int) -> None:
    generator, segments = np.random.default_rng(1), SegmentEncoder(published)
    for text in texts(count, seed=0):
        ids = published.encode(text)
        assert ids == published.backing(text).input_ids
        assert segments.encode(text).tolist() == ids
        for skips in (False, True):
            whole = published.decode(ids, skip_special_tokens=skips)
            assert streamed(published, ids, cuts=random_cuts(generator, len(ids)), skips=skips) == whole, (text, ids)


@CUT_EVERYWHERE
def test_texts_are_streamed_at_every_cut(published: Tokenizer, count: int) -> None:
    for text in texts(count, seed=2):
        ids = published.encode(text)
        whole = published.decode(ids)
        assert all(streamed(published, ids, cuts=[cut], skips=True) == whole for cut in range(len(ids)))


@FEW_OR_MANY
def test_any_ids_have_the_text_of_transformers(published: Tokenizer, count: int) -> None:
    """Random ids include cut characters, invalid bytes, special tokens, and ids without a token."""
    generator = np.random.default_rng(3)
    most = published.vocab_size + 100
    of_bytes = [token_id for token_id in range(published.vocab_size) if len(published.token_bytes(token_id)) == 1]
    for _ in range(count):
        ids = generator.integers(0, most, generator.integers(1, 12)).tolist()
        ids += generator.choice(of_bytes, generator.integers(0, 8)).tolist()
        generator.shuffle(ids)
        for skips in (False, True):
            cuts = random_cuts(generator, len(ids))
            whole = published.decode(ids, skip_special_tokens=skips)
            assert streamed(published, ids, cuts=cuts, skips=skips) == whole, ids


def test_a_text_that_is_too_long_is_refused_by_its_length(published: Tokenizer) -> None:
    """A text within the limit is never rejected."""
    for text in texts(500, seed=4):
        assert not published.exceeds(len(published.encode(text, add_special_tokens=False)), text)
    spaces = " " * 10_000
    assert not published.exceeds(len(published.encode(spaces)), spaces)
