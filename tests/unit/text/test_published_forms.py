"""Published tokenizer forms of every family, at small size: loaded, encoded and streamed as transformers does."""

from __future__ import annotations

import json

import pytest
import tokenizers

from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.tokenizer_forms import FORM_OF_FAMILY, FORMS, write_form
from tests.support.text.tokenizer_laws import hold_cuts, hold_ids, hold_lengths, hold_texts, texts


@pytest.fixture(params=sorted(FORM_OF_FAMILY), scope="module")
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    """Return a form's name and its tokenizer, loaded beside the `config.json` of a family."""
    family = request.param
    directory = tmp_path_factory.mktemp(family)
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    write_form(FORM_OF_FAMILY[family], directory)
    return FORM_OF_FAMILY[family], Tokenizer(directory)


def test_texts_and_ids_are_those_of_transformers(form: tuple[str, Tokenizer]) -> None:
    _, tokenizer = form
    hold_texts(tokenizer, count=100)
    hold_cuts(tokenizer, count=5)
    hold_ids(tokenizer, count=100)
    hold_lengths(tokenizer, count=50)


def test_ids_are_those_of_the_file(form: tuple[str, Tokenizer]) -> None:
    """Check that the class that transformers selects rebuilds the published pipeline."""
    _, tokenizer = form
    published = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    for text in texts(100, seed=6):
        assert tokenizer.encode(text) == published.encode(text).ids


def test_special_tokens_and_ends_are_the_published_ones(form: tuple[str, Tokenizer]) -> None:
    name, tokenizer = form
    published = FORMS[name]
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.special_ids} >= set(published.special)
    assert not tokenizer.special_ids & set(tokenizer.backing.convert_tokens_to_ids(list(published.plain)))
    ends = tokenizer.backing.convert_tokens_to_ids([published.eos, *published.ends])
    assert set(tokenizer.eos_token_ids) == set(ends)
    assert (tokenizer.encode("a")[0] == tokenizer.backing.bos_token_id) == published.adds_bos


def test_grammars_are_given_the_bytes_that_tokens_write(form: tuple[str, Tokenizer]) -> None:
    _, tokenizer = form
    table = vocabulary_of(tokenizer, tokenizer.vocab_size, eos_ids=tokenizer.eos_token_ids).tokens()
    first = [token_id for token_id in tokenizer.encode("a") if token_id not in tokenizer.special_ids]
    before = tokenizer.decode(first)
    for token_id in range(tokenizer.vocab_size):
        if token_id not in tokenizer.special_ids:
            written = tokenizer.token_bytes(token_id)
            assert table.decode_bytes([token_id]) == written or written == b"\xff", "the engine marks tokens by it"
            assert tokenizer.decode([*first, token_id]) == before + written.decode("utf-8", "replace")
