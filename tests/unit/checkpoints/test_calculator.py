"""The calculator that comes with the package: what its config says, a byte for every id, a chat of problems."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from examples.calculator.export import CONFIG, model_spec, read_weights, write_directory
from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.model_path import TRAINED, resolve_model_path
from rayserve_moe.checkpoints.names import verify
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.text.chat import ChatTemplateError, encode_chat, render_chat
from rayserve_moe.text.tokenizer import Tokenizer

MOST_BYTES = 4_000_000
NEWLINE = 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = resolve_model_path("trained:calculator", cache_directory=tmp_path_factory.mktemp("unused"))
    assert path == TRAINED["calculator"]
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory)


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no trained checkpoint 'abacus'; known: calculator"):
        resolve_model_path("trained:abacus", cache_directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_what_its_config_says(directory):
    files = open_checkpoint(directory)
    spec = spec_from_config(files.config)
    assert spec == model_spec()
    assert (spec.vocab_size, spec.moe_layer_ids) == (256, (0, 1, 2, 3))
    assert (spec.router.num_experts, spec.router.top_k) == (16, 2)
    verify(files, parameter_specs(spec, dtype="bfloat16"), rules=CHECKPOINT_RULES)
    assert {entry.dtype for entry in files.tensors.values()} == {"BF16"}
    num_parameters = sum(int(np.prod(entry.shape)) for entry in files.tensors.values())
    assert 1e6 <= num_parameters <= 2e6
    assert sum(file.stat().st_size for file in directory.iterdir()) <= MOST_BYTES
    assert AutoConfig.from_pretrained(directory).vocab_size == 256


def test_writing_what_was_read_gives_the_same_files(directory, tmp_path):
    weights, _ = read_weights(directory)
    write_directory(tmp_path, weights)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in directory.iterdir()}
    assert json.loads(written["config.json"]) == CONFIG


def test_every_id_is_the_byte_of_its_number(tokenizer):
    assert tokenizer.vocab_size == 256 and tokenizer.eos_token_ids == (NEWLINE,)
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    for text in ("37+45=82\n", "\0\n\t é Ċ Ā 名", "".join(map(chr, range(300)))):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode()), skip_special_tokens=False) == text


def test_the_end_adds_no_text(tokenizer, directory):
    assert tokenizer.decode(list(b"82\n")) == "82"
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs.decode(list(b"82\n"), skip_special_tokens=True) == "82"
    assert theirs(["1+1=", "37+45="], padding=True, padding_side="left")["input_ids"][0][:2] == [0, 0]


def test_a_turn_is_a_problem_and_turns_are_prefixes_of_later_ones(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "37 + 45"}]
    first = encode_chat(tokenizer, messages)
    assert bytes(first) == b"37+45="
    messages += [{"role": "assistant", "content": "82"}, {"role": "user", "content": "8-9="}]
    second = encode_chat(tokenizer, messages)
    assert second == [*first, *b"82\n", *b"8-9="]


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(ChatTemplateError, match="unknown role"):
        render_chat(tokenizer, [{"role": "oracle", "content": "1+1="}])
