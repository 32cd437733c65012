"""The byte-level tokenizer of a synthetic checkpoint, and one with added tokens of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rayserve_moe.checkpoints.synthetic import write_tokenizer
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.fallback_tokenizer import write_fallback_tokenizer

VOCAB_SIZE = 270


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCAB_SIZE)
    return path


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="session")
def extended(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Adds plain and special tokens, with and without characters of the byte alphabet, as large models have them."""
    backing = AutoTokenizer.from_pretrained(directory)
    backing.add_tokens(["<|fim▁begin|>", "日本", "Ġx", "plain", "ab cd"])
    backing.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("<|spécial▁|>", special=True)])
    path = tmp_path_factory.mktemp("extended")
    backing.save_pretrained(path)
    return Tokenizer(path)


@pytest.fixture(scope="session", params=["Mixtral's", "Gemma's"])
def fallback(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Falls back to bytes for what has no token, with a space in front of a text or without."""
    path = tmp_path_factory.mktemp("fallback")
    write_fallback_tokenizer(path, adds_space=request.param == "Mixtral's")
    return Tokenizer(path)
