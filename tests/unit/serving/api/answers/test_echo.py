"""An echoed prompt is the text that was sent, and offsets count in it, with every form of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.logprobs import CompletionLogprobs, num_added_ids
from rayserve_moe.serving.api.schemas.openai import CompletionBody
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.tokenizer_forms import FORMS, write_form
from tests.support.text.tokenizer_laws import texts


@pytest.fixture(params=sorted(FORMS), scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("form")
    (directory / "config.json").write_text(json.dumps({"model_type": FORMS[request.param].families[0]}))
    write_form(request.param, directory)
    return Tokenizer(directory)


def offsets_of(tokenizer: Tokenizer, text: str, *, output_ids: list[int]) -> list[int]:
    body = CompletionBody.model_validate({"prompt": text, "echo": True, "logprobs": 1})
    prompt_ids = np.asarray(tokenizer.encode(text), np.int32)
    request = GenerationRequest("r", prompt_ids, SamplingParams())
    zeros, ranks = [0.0] * len(output_ids), [1] * len(output_ids)
    delta = ChoiceResult("r", 0, token_ids=output_ids, logprobs=zeros, ranks=ranks)
    columns = CompletionLogprobs(tokenizer, request, body=body, prompt_text=text).write(delta)
    return columns["text_offset"]


def hold_offsets(tokenizer: Tokenizer, *, count: int) -> None:
    """Check that offsets of random prompts count in the text as sent, and that the answer begins at its end."""
    answer = tokenizer.encode("a the cat", add_special_tokens=False)[1:]
    for text in filter(None, texts(count, seed=7)):
        ids = tokenizer.encode(text)
        offsets = offsets_of(tokenizer, text, output_ids=answer)
        assert offsets[0] == 0 and offsets == sorted(offsets)
        assert offsets[len(ids)] == len(text), "the answer begins where the prompt ends"
        num_added = num_added_ids(tokenizer, ids, text=text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids[num_added:]
        if tokenizer.decode(ids[num_added:], skip_special_tokens=False) == text:
            spelled = [tokenizer.token_text(token_id) for token_id in ids]
            for place in range(num_added + 1, len(ids)):
                is_whole = "\N{REPLACEMENT CHARACTER}" not in spelled[place]
                assert not is_whole or text.startswith(spelled[place], offsets[place]), (text, spelled, offsets)


def test_offsets_count_in_the_text_that_was_sent(tokenizer: Tokenizer) -> None:
    hold_offsets(tokenizer, count=150)


def test_offsets_count_in_a_text_that_is_normalized(tokenizer: Tokenizer) -> None:
    """Check texts whose encoded form has another length: composed letters and added spaces."""
    for text in ("e\u0301 cafe\u0301 the cat", "\u1112\u1161\u11ab the cat", " <|im_start|>the cat"):
        ids = tokenizer.encode(text)
        offsets = offsets_of(tokenizer, text, output_ids=[])
        last = max(
            place for place, token_id in enumerate(ids) if tokenizer.token_text(token_id).lstrip() in ("c", "cat")
        )
        assert text[offsets[last] :].lstrip().startswith("c") and offsets[last] >= len(text) - 4, (text, offsets)


def test_a_first_token_that_the_text_spells_itself_is_not_hidden(tokenizer: Tokenizer) -> None:
    bos = tokenizer.backing.bos_token
    if bos is None:
        pytest.skip("there is no first token")
    ids = tokenizer.encode(f"{bos}the cat")
    num_added = num_added_ids(tokenizer, ids, text=f"{bos}the cat")
    assert num_added == ids.count(tokenizer.backing.bos_token_id) - 1
    assert offsets_of(tokenizer, f"{bos}the cat", output_ids=[])[num_added + 1] == len(bos)
