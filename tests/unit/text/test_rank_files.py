"""Tokenizers of rank files: ids of tiktoken, and a clear error for a damaged file."""

from __future__ import annotations

import json
import os
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.mistral.tokenizer import MistralConverter

from rayserve_moe.checkpoints.model_path import SMALL_FILES
from rayserve_moe.checkpoints.synthetic import write_tokenizer
from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.text.chat import render_chat
from rayserve_moe.text.rank_files import RANK_FILES, TEKKEN_NAMES, RankedTokens, code_named, ranked_tokenizer
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, SegmentEncoder, Tokenizer, TokenizerError
from tests.support.text.rank_files import (
    CORPUS,
    HUNYUAN,
    KIMI,
    MOONLIGHT,
    TEKKEN_PATTERN,
    encoding,
    rank_lines,
    tekken_content,
    tiktoken_encoding,
    trained_tokens,
    write_tekken,
    write_tiktoken,
)

PIECES = [
    *(word for text in CORPUS for word in text.split(" ")),
    "  ",
    "\n",
    "\r\n\r\n",
    "'S",
    "\u017f",
    "\ufb00",
    " qzxw",
    "漢漢字",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join)
CODES = [KIMI, MOONLIGHT, HUNYUAN]
FORMS = [*CODES, "tekken"]
NUM_RANKS = len(trained_tokens())


@cache
def opened(form: str, folder: Path) -> Tokenizer:
    path = folder / form
    return Tokenizer(write_tekken(path, tekken_content()) if form == "tekken" else write_tiktoken(path, form))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(params=FORMS)
def ranked(request, folder) -> Tokenizer:
    return opened(request.param, folder)


@given(text=TEXTS)
@pytest.mark.parametrize("code", CODES)
def test_ids_are_those_of_tiktoken(folder, code, text):
    tokenizer, wanted = opened(code, folder), tiktoken_encoding(code)
    for given_text in (text, f"{text}<|im_end|><|extra_7|>{text}[PAD]<|reserved_token_{NUM_RANKS + 77}|>"):
        normal = unicodedata.normalize("NFC", given_text) if code == HUNYUAN else given_text
        ids = wanted.encode(normal, allowed_special="all")
        assert tokenizer.encode(given_text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == wanted.decode(ids) == normal
    assert tokenizer.vocab_size == wanted.n_vocab


@given(text=TEXTS)
def test_ids_of_tekken_are_those_of_tiktoken_after_the_special_ones(folder, text):
    content = tekken_content()
    size, num_special = (content["config"][f"default_{key}"] for key in ("vocab_size", "num_special_tokens"))
    wanted = encoding(trained_tokens()[: size - num_special], TEKKEN_PATTERN, special={})
    tokenizer = opened("tekken", folder)
    ids = [num_special + rank for rank in wanted.encode_ordinary(text)]
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.encode(f"[INST]{text}</s>", add_special_tokens=False) == [3, *ids, 2]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == size


@given(text=TEXTS)
def test_named_tokens_of_tekken_are_as_transformers_has_them(tmp_path_factory, text):
    names = ["<unk>", "<s>", "</s>", "[INST]", "[THINK]"]
    path = write_tekken(tmp_path_factory.mktemp("named"), tekken_content(names=names))
    tokenizer, wanted = Tokenizer(path), MistralConverter(str(path / "tekken.json")).converted()
    assert tokenizer.backing.get_vocab() == wanted.get_vocab()
    assert tokenizer.encode(f"[THINK]{text}", add_special_tokens=False) == wanted.encode(f"[THINK]{text}").ids
    assert tokenizer.special_ids == set(range(30))
    assert tokenizer.token_text(29) == "<SPECIAL_29>"


OF_THREE = st.text("abc", min_size=2, max_size=5)


@given(tokens=st.lists(OF_THREE, unique=True, max_size=40), texts=st.lists(st.text("abc", max_size=30), max_size=6))
def test_any_ranks_give_the_ids_of_tiktoken(tokens, texts):
    """Check ranks in any order, with tokens that merges never reach or reach by several ways."""
    by_rank = (*(bytes([byte]) for byte in range(256)), *(token.encode() for token in tokens))
    built = ranked_tokenizer(RankedTokens(by_rank, first_id=0, special={}, pattern=r"\S+|\s+"))
    wanted = encoding(by_rank, r"\S+|\s+", special={})
    for text in (*texts, " ".join(texts)):
        assert built.encode(text).ids == wanted.encode_ordinary(text)


@given(text=TEXTS, seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("form", FORMS)
def test_a_text_is_streamed_as_it_is_decoded(folder, form, text, seed):
    tokenizer = opened(form, folder)
    ids = tokenizer.encode(f"{text}</s>[EOS]<|eos|>{text}")
    ids += np.random.default_rng(seed).integers(0, tokenizer.vocab_size + 9, 12).tolist()
    assert SegmentEncoder(tokenizer).encode(text).tolist() == tokenizer.encode(text)
    for hidden in (None, frozenset()):
        detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=hidden)
        pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=hidden is None)


def test_each_rank_writes_its_bytes(ranked):
    first = 30 if ranked.vocab_size < NUM_RANKS + 200 else 0
    tokens = trained_tokens()[: ranked.vocab_size - 30 if first else None]
    assert [ranked.token_bytes(first + rank) for rank in range(len(tokens))] == list(tokens)
    table = vocabulary_of(ranked, ranked.vocab_size, eos_ids=ranked.eos_token_ids).tokens()
    for rank, token in enumerate(tokens):
        assert table.decode_bytes([first + rank]) == token or token == b"\xff", "the engine marks by that byte"


@given(text=TEXTS)
def test_a_text_within_the_limit_is_never_rejected(folder, text):
    for form in FORMS:
        tokenizer = opened(form, folder)
        assert not tokenizer.exceeds(len(tokenizer.encode(text)), text)
        assert tokenizer.exceeds(10, "x" * 10_000)


def test_special_tokens_are_those_of_the_configuration(folder):
    kimi, hunyuan, tekken = opened(KIMI, folder), opened(HUNYUAN, folder), opened("tekken", folder)
    assert kimi.eos_token_ids == (NUM_RANKS + 1,) and kimi.backing.bos_token == "[BOS]"
    shown = NUM_RANKS + 3
    assert kimi.special_ids == set(range(NUM_RANKS, NUM_RANKS + 256)) - {shown}
    assert kimi.decode([NUM_RANKS + 2, shown, NUM_RANKS + 5]) == "<|tool_call|>"
    assert hunyuan.eos_token_ids == (NUM_RANKS + 3,) and hunyuan.backing.pad_token_id == NUM_RANKS + 4
    assert hunyuan.token_text(NUM_RANKS + 209) == "<|extra_204|>"
    assert tekken.eos_token_ids == (2,) and tekken.backing.bos_token_id == 1 and tekken.backing.pad_token_id == 11
    assert [tekken.token_text(i) for i in range(30)] == [*TEKKEN_NAMES, *(f"<SPECIAL_{i}>" for i in range(20, 30))]


def test_a_configuration_renames_special_tokens_and_turns_the_first_token_off(tmp_path):
    path = write_tekken(tmp_path, tekken_content(num_special=20))
    names = {**dict(enumerate(TEKKEN_NAMES)), 10: "<pad>", 11: "[PREFIX]", 14: "<SPECIAL_14>"}
    listed = {str(i): {"content": name, "special": True} for i, name in names.items()}
    config = {"added_tokens_decoder": listed, "add_bos_token": False, "eos_token": "[/INST]"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(path)
    assert tokenizer.encode("[PREFIX]<pad>") == [11, 10]
    assert tokenizer.eos_token_ids == (4,) and tokenizer.vocab_size == NUM_RANKS - 7 + 20


@pytest.mark.parametrize("in_file", [False, True])
def test_a_chat_has_the_template_of_the_checkpoint(tmp_path, in_file):
    template = "[BOS]{% for m in messages %}{{ m.role }}<|im_end|>{{ m.content }}{% endfor %}"
    path = write_tiktoken(tmp_path, KIMI, **({} if in_file else {"chat_template": template}))
    if in_file:
        (path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(path)
    text = render_chat(tokenizer, [{"role": "user", "content": "你好"}])
    assert text == "[BOS]user<|im_end|>你好"
    assert tokenizer.encode(text)[0] == NUM_RANKS and NUM_RANKS + 2 in tokenizer.encode(text)


def test_a_tokenizer_json_comes_first(tmp_path):
    """Check that tokenizer.json loads despite the class of the checkpoint's own code, which is never run."""
    write_tokenizer(tmp_path / "alone", 300)
    path = write_tiktoken(tmp_path / "both", KIMI, eos_token="</s>", bos_token="<s>", pad_token="<pad>")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {}}))
    (path / "tokenizer.json").write_bytes((tmp_path / "alone" / "tokenizer.json").read_bytes())
    for model_type in ("deepseek_v3", "kimi_k2", "hunyuan", "mixtral"):
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert Tokenizer(path).encode("été</s>") == Tokenizer(tmp_path / "alone").encode("été</s>")
    write_tekken(path, tekken_content())
    assert Tokenizer(path).eos_token_ids == (1,)


def test_rank_files_are_among_the_small_files_of_a_remote_checkpoint():
    assert set(RANK_FILES) < set(SMALL_FILES)


@pytest.mark.parametrize(
    ("auto_map", "name"),
    [
        ({"AutoTokenizer": ["a.B", None]}, "a.B"),
        ({"AutoTokenizer": [None, "a.B"]}, "a.B"),
        ({"AutoTokenizer": "org/model--a.B"}, "a.B"),
        (["a.B", None], "a.B"),
        ({"AutoModel": "a.B"}, None),
        ({"AutoTokenizer": 7}, None),
        (None, None),
    ],
)
def test_the_code_is_named_by_its_module_and_class(auto_map, name):
    assert code_named({"auto_map": auto_map}) == name


def named(**tokens):
    return {"added_tokens_decoder": {str(NUM_RANKS): {"content": "[BOS]"}, **tokens}}


LINES = rank_lines(trained_tokens())
DAMAGED = {
    "truncated base64": (LINES[: LINES.rindex(b" ") - 1], f"line {NUM_RANKS} is not a token in base64"),
    "a last line without its rank": (LINES[: LINES.rindex(b" ")], f"line {NUM_RANKS} is not a token in base64"),
    "a cut rank": (LINES[:-2], f"rank {(NUM_RANKS - 1) // 10} has two tokens"),
    "no base64": (b"*** 0\n" + LINES, "line 1 is not a token in base64"),
    "no UTF-8": (b"\xff\xfe\x00" * 99, "line 1 is not a token in base64"),
    "a hole": (LINES.replace(b" 300\n", b" 3000\n"), "rank 300 has no token"),
    "a rank below zero": (LINES.replace(b" 300\n", b" -1\n"), "rank 300 has no token"),
    "a rank twice": (LINES.replace(b" 300\n", b" 299\n"), "rank 299 has two tokens"),
    "a token twice": (rank_lines([*trained_tokens(), trained_tokens()[300]]), "is empty or has two ranks"),
    "a byte missing": (rank_lines(trained_tokens()[1:]), "byte 33 has no token"),
    "nothing": (b"", "byte 0 has no token"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("code", [KIMI, HUNYUAN])
def test_a_damaged_rank_file_is_one_clear_error(tmp_path, code, content, message):
    path = write_tiktoken(tmp_path, code)
    file = path / ("hy.tiktoken" if code == HUNYUAN else "tiktoken.model")
    file.write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as refusal:
        Tokenizer(path)
    assert str(path) in str(refusal.value) and file.name in str(refusal.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    path = write_tiktoken(tmp_path, KIMI)
    (path / "tiktoken.model").unlink()
    os.mkfifo(path / "tiktoken.model")
    with pytest.raises(TokenizerError, match="not a regular file"):
        Tokenizer(path)


CONFIGURED = {
    "no code": ({"auto_map": None}, "names no tokenizer code; a tokenizer.json would do"),
    "unknown code": (
        {"auto_map": {"AutoTokenizer": "a.B"}},
        "unknown for a.B; a tokenizer.json would do. Known by auto",
    ),
    "code of another file": ({"auto_map": {"AutoTokenizer": HUNYUAN}}, "unknown for tokenization_hy.HYTokenizer"),
    "an id of a rank": (named(**{"5": {"content": "x"}}), "has id 5, but special tokens have the ids"),
    "an id beyond": (named(**{str(2**40): {"content": "x"}}), f"has id {2**40}, but"),
    "no id": (named(a={"content": "x"}), "added_tokens_decoder: "),
    "no token": (named(**{str(NUM_RANKS + 9): "x"}), "added_tokens_decoder: "),
    "a list": ({"added_tokens_decoder": [1]}, "added_tokens_decoder: "),
    "no content": (named(**{str(NUM_RANKS + 9): {"content": ""}}), "is empty, or is spelled like another"),
    "a name twice": (named(**{str(NUM_RANKS + 9): {"content": "[BOS]"}}), "spelled like another token"),
    "the name of a token": (named(**{str(NUM_RANKS + 9): {"content": "Ġthe"}}), "spelled like another token"),
    "an unknown end": ({"eos_token": "<|nowhere|>"}, "the vocabulary has no token '<|nowhere|>'"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGURED.values(), ids=CONFIGURED.keys())
def test_a_configuration_that_does_not_fit_is_one_clear_error(tmp_path, changes, message):
    path = write_tiktoken(tmp_path, KIMI, **changes)
    with pytest.raises(TokenizerError, match=message.replace("|", r"\|")) as refusal:
        Tokenizer(path)
    assert str(path) in str(refusal.value)


def test_a_configuration_is_read_strictly_for_a_rank_file_alone(tmp_path):
    path, twice = write_tiktoken(tmp_path, KIMI), '{"pad_token": "<pad>", "pad_token": "<pad>"}'
    (path / "tokenizer_config.json").write_text(twice)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*the same key twice"):
        Tokenizer(path)
    write_tokenizer(path, 300)
    (path / "tokenizer_config.json").write_text(twice)
    assert Tokenizer(path).vocab_size == 300


def test_a_tekken_file_without_a_first_token_adds_none(tmp_path):
    path = write_tekken(tmp_path, tekken_content(names=["</s>"]))
    tokenizer = Tokenizer(path)
    assert tokenizer.backing.bos_token is None and tokenizer.eos_token_ids == (0,)
    assert tokenizer.encode("the") == tokenizer.encode("the", add_special_tokens=False) != []


def test_a_rank_file_without_a_configuration_is_one_clear_error(tmp_path):
    path = write_tiktoken(tmp_path, KIMI)
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="names no tokenizer code"):
        Tokenizer(path)


def test_a_sentencepiece_model_alone_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is not read; save_pretrained"):
        Tokenizer(tmp_path)


def entry(**changes):
    def change(content):
        content["vocab"][300] |= changes

    return change


def config(**changes):
    return lambda content: content["config"].update(changes)


def special(*listed):
    return lambda content: content.update(special_tokens=[*listed])


TEKKEN_FAULTS = {
    "no config": (lambda content: content.pop("config"), "no config or no vocab"),
    "no vocab": (lambda content: content.update(vocab={}), "no config or no vocab"),
    "no pattern": (config(pattern=None), "no pattern"),
    "a broken pattern": (config(pattern="("), "no usable tokenizer"),
    "a possessive interval": (config(pattern=r"\p{N}{1,3}+|."), "possessive interval"),
    "no base64": (entry(token_bytes="*"), "without token_bytes in base64"),
    "truncated base64": (entry(token_bytes="aG"), "without token_bytes in base64"),
    "no token": (lambda content: content["vocab"].__setitem__(300, None), "vocab has an entry without"),
    "a rank twice": (entry(rank=299), "rank 299 has two tokens"),
    "a rank of another kind": (entry(rank="300"), "a rank that is no number"),
    "a token twice": (entry(token_bytes="IQ=="), "has two ranks"),
    "too few tokens": (config(default_vocab_size=10**6), f"default_vocab_size must be 30 to {NUM_RANKS + 30}"),
    "too few special ids": (config(default_num_special_tokens=3), "default_num_special_tokens must be 20 to"),
    "too many special ids": (config(default_num_special_tokens=10**9), "default_num_special_tokens must be 20 to"),
    "a size of another kind": (config(default_vocab_size=3.5), "default_vocab_size must be"),
    "no names in a late version": (config(version="v13"), "no special_tokens, and its version is 'v13'"),
    "a name without rank": (special({"token_str": "<s>"}), "without rank or token_str"),
    "a hole in special ranks": (special({"rank": 1, "token_str": "<s>"}), "each rank from 0 on once"),
    "special tokens of another kind": (special(7), "without rank or token_str"),
    "a name of another kind": (special({"rank": 0, "token_str": 7}), "is no text"),
}


@pytest.mark.parametrize(("change", "message"), TEKKEN_FAULTS.values(), ids=TEKKEN_FAULTS.keys())
def test_a_damaged_tekken_file_is_one_clear_error(tmp_path, change, message):
    content = tekken_content()
    change(content)
    path = write_tekken(tmp_path, content)
    with pytest.raises(TokenizerError, match=message) as refusal:
        Tokenizer(path)
    assert str(path) in str(refusal.value)


def test_a_tekken_file_that_is_cut_is_one_clear_error(tmp_path):
    path = write_tekken(tmp_path, tekken_content())
    text = (path / "tekken.json").read_text()
    (path / "tekken.json").write_text(text[: len(text) // 2])
    with pytest.raises(TokenizerError, match=r"tekken\.json: not readable as JSON"):
        Tokenizer(path)
