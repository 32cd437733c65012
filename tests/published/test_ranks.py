"""Published rank files: ids of tiktoken, of the published `tokenizer.json`, and of the checkpoints' own tokenizers."""

from __future__ import annotations

import json
from base64 import b64decode

import pytest

from rayserve_moe.text.rank_files import RankedTokens, ranked_tokenizer
from rayserve_moe.text.tokenizer import Tokenizer
from tests.published.test_texts import FEW_OR_MANY
from tests.support.text.published_tokenizers import KIMI, TEKKEN, folder_of, opened
from tests.support.text.rank_files import KIMI_PATTERN, TEKKEN_PATTERN, encoding
from tests.support.text.tokenizer_laws import texts

pytestmark = pytest.mark.published
OF_KIMI = {
    "Hello world": [19180, 2695],
    "Hello, world!": [19180, 11, 2695, 0],
    "你好世界": [33845, 2243],
    "1234567890": [6694, 12972, 16242, 15],
    "中文English混合": [16717, 44372, 13935],
}
"""Ids of Moonshot's own tokenizer."""


@FEW_OR_MANY
def test_ids_of_kimi_are_those_of_tiktoken(count: int) -> None:
    tokenizer = opened(KIMI)
    tokens = [tokenizer.token_bytes(rank) for rank in range(163_584)]
    special = {tokenizer.token_text(token_id): token_id for token_id in range(163_584, 163_840)}
    wanted = encoding(tokens, KIMI_PATTERN, special=special)
    lines = (folder_of(KIMI) / "tiktoken.model").read_bytes().splitlines()
    assert [b64decode(line.split()[0]) for line in lines] == tokens
    for text in (*OF_KIMI, *texts(count, seed=5)):
        assert tokenizer.encode(text) == wanted.encode(text, allowed_special="all"), text


def test_ids_of_kimi_are_those_of_its_own_tokenizer() -> None:
    assert {text: opened(KIMI).encode(text) for text in OF_KIMI} == OF_KIMI


@FEW_OR_MANY
@pytest.mark.parametrize("name", TEKKEN)
def test_ids_of_tekken_are_those_of_tiktoken_and_of_its_tokenizer_json(name: str, count: int) -> None:
    tokenizer, published = opened(name), opened("mistral_nemo")
    content = json.loads((folder_of(name) / "tekken.json").read_text())
    assert content["config"]["pattern"] == TEKKEN_PATTERN
    tokens = [b64decode(entry["token_bytes"]) for entry in content["vocab"][:130_072]]
    wanted = encoding(tokens, TEKKEN_PATTERN, special={})
    for text in texts(count, seed=6):
        assert tokenizer.encode(text) == published.encode(text), text
        if not any(token in text for token in ("[INST]", "</s>")):
            assert tokenizer.encode(text) == [1, *(1000 + rank for rank in wanted.encode_ordinary(text))], text


@FEW_OR_MANY
def test_ranks_alone_give_the_ids_of_a_tokenizer_json(count: int) -> None:
    """Check that the ranks restore the merges of gpt-oss's file."""
    published = opened("gptoss")
    described = json.loads((folder_of("gptoss") / "tokenizer.json").read_text())
    pattern = described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    num_ranks = len(described["model"]["vocab"])
    tokens = tuple(published.token_bytes(rank) for rank in range(num_ranks))
    special = {i: token for i, token in published.backing.added_tokens_decoder.items() if i >= num_ranks}
    built = ranked_tokenizer(RankedTokens(tokens, first_id=0, special=special, pattern=pattern))
    for text in texts(count, seed=7):
        assert built.encode(text).ids == published.encode(text), text


def test_the_rank_files_of_the_same_vocabulary_have_the_same_ids() -> None:
    first, second = (Tokenizer(folder_of(name)) for name in TEKKEN)
    assert first.backing.get_vocab() == second.backing.get_vocab()
