"""Bad words become token ids, as they stand and after a space."""

from __future__ import annotations

import json
import shutil

import pytest

from rayserve_moe.requests.records import RequestError
from rayserve_moe.text.request_limits import bad_word_ids
from rayserve_moe.text.tokenizer import Tokenizer
from tests.unit.text.conftest import VOCAB_SIZE


def test_words_are_ids_as_they_stand_and_after_a_space(tokenizer):
    ids = bad_word_ids(tokenizer, ["ab", " ab"])
    assert tuple(tokenizer.encode("ab", add_special_tokens=False)) in ids and len(set(ids)) == len(ids)
    with pytest.raises(RequestError, match="empty"):
        bad_word_ids(tokenizer, ["   "])


def test_a_word_that_is_one_token_only_after_a_space_is_banned_there(tmp_path, directory):
    path = shutil.copytree(directory, tmp_path / "model")
    written = json.loads((path / "tokenizer.json").read_text())
    vocabulary, model = written["model"]["vocab"], written["model"]
    for place, piece in enumerate(["Ġw", "Ġwo"]):
        del vocabulary[f"<id_{VOCAB_SIZE - 1 - place}>"]
        vocabulary[piece] = VOCAB_SIZE - 1 - place
    model["merges"] = [["Ġ", "w"], ["Ġw", "o"]]
    (path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = Tokenizer(path)
    assert tokenizer.encode(" wo", add_special_tokens=False) == [vocabulary["Ġwo"]]
    assert bad_word_ids(tokenizer, ["wo"]) == ((vocabulary["w"], vocabulary["o"]), (vocabulary["Ġwo"],))
