"""Encoding and decoding follow the checkpoint's tokenizer, and each id has bytes of its own."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.text.tokenizer import Tokenizer, TokenizerError

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"


@given(text=st.text())
def test_plain_text_survives_encoding_and_decoding(tokenizer, text):
    ids = tokenizer.encode(text)
    if not {0, 1, 2} & set(ids):
        assert tokenizer.decode(ids) == text
        assert ids == [3 + _rank(byte) for byte in text.encode()]


def _rank(byte: int) -> int:
    """Place of a byte in the sorted byte alphabet: bytes that stand for themselves, then the others."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*own, *(other for other in range(256) if other not in own)].index(byte)


def test_every_id_of_the_vocabulary_decodes_to_its_bytes(tokenizer, extended):
    for each in (tokenizer, extended):
        for token_id in range(each.vocab_size):
            text = each.decode([token_id], skip_special_tokens=False)
            assert each.token_bytes(token_id).decode("utf-8", "replace") == text == each.token_text(token_id)
            assert text


def test_ids_beyond_the_bytes_are_printable_and_never_encoded(tokenizer):
    assert tokenizer.decode([260, 261]) == "<id_260><id_261>"
    assert 260 not in tokenizer.encode("<id_260>")


def test_ids_of_no_token_add_nothing(tokenizer):
    assert tokenizer.decode([70, 100_000, 71]) == tokenizer.decode([70, 71])
    assert tokenizer.token_bytes(100_000) == b""


def test_special_tokens_are_known_and_skipped_on_request(tokenizer, extended):
    assert tokenizer.special_ids == {0, 1, 2}
    ids = [0, *tokenizer.encode("a</s>b"), 2]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>b<pad>"
    turn = extended.encode("<|turn|>")
    assert len(turn) == 1 and turn[0] in extended.special_ids


@pytest.mark.parametrize(
    ("written", "wanted"),
    [(None, (1,)), ("{}", (1,)), ('{"eos_token_id": 5}', (1, 5)), ('{"eos_token_id": [9, 1]}', (1, 9))],
)
def test_end_of_sequence_joins_tokenizer_and_generation_config(tmp_path, directory, written, wanted):
    path = shutil.copytree(directory, tmp_path / "model")
    if written is not None:
        (path / "generation_config.json").write_text(written)
    assert Tokenizer(path).eos_token_ids == wanted


def _decoder(kind):
    def change(path):
        content = json.loads((path / "tokenizer.json").read_text())
        content["decoder"] = kind
        (path / "tokenizer.json").write_text(json.dumps(content))

    return change


UNUSABLE = {
    "no directory": (shutil.rmtree, ["tokenizer.json", "missing"]),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), ["tokenizer.json", "missing"]),
    "not JSON": (lambda path: (path / "tokenizer.json").write_text("{"), ["no usable tokenizer"]),
    "another JSON": (lambda path: (path / "tokenizer.json").write_text("{}"), ["no usable tokenizer"]),
    "no decoder": (_decoder(None), ["by nothing", "ByteLevel"]),
    "another decoder": (_decoder({"type": "Fuse"}), ["Fuse", "ByteLevel"]),
    "generation config": (lambda path: (path / "generation_config.json").write_text("[]"), ["generation_config.json"]),
    "end of words": (
        lambda path: (path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}'),
        ["generation_config.json", "eos_token_id"],
    ),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_tokenizer_is_one_clear_error(tmp_path, directory, what):
    damage, words = UNUSABLE[what]
    path = shutil.copytree(directory, tmp_path / "model")
    Tokenizer(path)
    damage(path)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


NESTED = "[" * 100_000 + "]" * 100_000
BROKEN = {
    "a pipe": (TOKENIZER, lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
    "a directory": (TOKENIZER, lambda file: (file.unlink(), file.mkdir()), "not a regular file"),
    "a pipe for a template": (
        "chat_template.jinja",
        lambda file: (file.unlink(True), os.mkfifo(file)),
        "not a regular",
    ),
    "not JSON": (TOKENIZER, lambda file: file.write_text("{"), "no usable tokenizer"),
    "of another kind": (TOKENIZER, lambda file: file.write_text('{"model": {"type": "None"}}'), "no usable tokenizer"),
    "nested": (TOKENIZER, lambda file: file.write_text('{"model": ' + NESTED + "}"), "no usable tokenizer"),
    "configured by a nest": ("tokenizer_config.json", lambda file: file.write_text(NESTED), "no usable tokenizer"),
    "ends in a nest": (
        GENERATION,
        lambda file: file.write_text('{"eos_token_id": ' + NESTED + "}"),
        "nested too deeply",
    ),
    "ends nowhere": (GENERATION, lambda file: file.write_text('{"eos_token_id": 1e400}'), "too large"),
    "ends beyond ids": (GENERATION, lambda file: file.write_text('{"eos_token_id": [true, -1]}'), "must be an id"),
}


@pytest.mark.parametrize(("name", "damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_whatever_its_files_hold_is_one_clear_error(tmp_path, directory, name, damage, message):
    path = shutil.copytree(directory, tmp_path / "model")
    damage(path / name)
    with pytest.raises(TokenizerError, match=message) as refusal:
        Tokenizer(path)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v3", "n_shared_experts": None},
        {"model_type": "qwen3_moe", "num_experts": None, "num_local_experts": 4},
        {"model_type": "mixtral", "attention_dropout": "none"},
        {"model_type": "of_nobody"},
    ],
    ids=str,
)
def test_values_that_do_not_concern_a_tokenizer_do_not_keep_it_from_loading(tmp_path, directory, config):
    """The config of a model is read, and refused, elsewhere; the readers of transformers are stricter than others."""
    path = shutil.copytree(directory, tmp_path / "model")
    before = Tokenizer(path).backing.get_vocab()
    (path / "config.json").write_text(json.dumps(config))
    assert Tokenizer(path).backing.get_vocab() == before
