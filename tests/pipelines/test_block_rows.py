"""Index rows of block-sparse attention: numbers of blocks by layer and head of the index, and a replay of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine, extract_indexer_topk_from_meta_info
from rayserve_moe.requests.records import RequestError
from tests.pipelines.test_index_rows import PROMPTS, experts_of, read_by, replayed
from tests.support.engine.shared_settings import INDEXED
from tests.support.models.families import family_case, write_family
from tests.support.models.full_logits import prompt_outputs_of

CASE = family_case("minimax_m3_vl_text-1")
SIZE, TOP_K = CASE.config["index_block_size"], CASE.config["index_topk_blocks"]
ROWS = [0, 0, 1, 1, 2, 2]
"""The layer of each row of a token: two heads of an index each."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = write_family(CASE, tmp_path_factory.mktemp("blocks") / "model", seed=5)
    with Engine(str(path), **INDEXED) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[dict]:
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    rows = {"return_routed_experts": True, "return_indexer_topk": True}
    return engine.generate(input_ids=PROMPTS, sampling_params=sampling, **rows)


@pytest.mark.slow
def test_rows_are_the_blocks_that_each_head_chooses(engine: Engine, answers: list[dict]):
    outputs_of = prompt_outputs_of(engine.runner, longest=96)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        rows, info = extract_indexer_topk_from_meta_info(answer), answer["meta_info"]["indexer_topk_info"]
        ids = read_by(prompt, answer)
        assert rows.shape == (len(ids), len(ROWS), TOP_K)
        assert (info["layer_ids"], info["block_size"], info["missing"]) == (ROWS, SIZE, [])
        chosen_ITK = outputs_of(ids).chosen_ITK
        assert chosen_ITK is not None
        np.testing.assert_array_equal(rows, chosen_ITK.swapaxes(0, 1))
    last = extract_indexer_topk_from_meta_info(answers[2])[-1]
    assert (last != np.arange(TOP_K)).any() and (last[0] != last[1]).any()


@pytest.mark.slow
def test_a_replay_has_the_log_probs_of_the_run_and_an_altered_choice_is_seen(engine: Engine, answers: list[dict]):
    """A token that sees its own block only, by one head, has another log-prob, and those before it do not."""
    free = replayed(engine, answers, [None] * 3)
    same = replayed(engine, answers, [answer["meta_info"]["indexer_topk"] for answer in answers])
    altered = [extract_indexer_topk_from_meta_info(answer) for answer in answers]
    places = (20, 38, 70)
    for rows, position in zip(altered, places, strict=True):
        rows[position, 1] = [position // SIZE] + [-1] * (TOP_K - 1)
    changed = replayed(engine, answers, altered)
    for ours, theirs, other, position in zip(same, free, changed, places, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(other[:position], theirs[:position], rtol=0, atol=1e-5)
        assert abs(other[position] - theirs[position]) > 1e-4


@pytest.mark.slow
def test_a_block_after_the_own_one_is_refused(engine: Engine, answers: list[dict]):
    rows = extract_indexer_topk_from_meta_info(answers[0])[:5]
    rows[4, 3, :2] = [0, 1]
    with pytest.raises(RequestError, match="row 4 must hold ascending blocks up to 0, then -1"):
        engine.generate(
            input_ids=PROMPTS[0],
            sampling_params={"max_new_tokens": 0},
            forced_routed_experts=experts_of(engine, answers[0])[:5],
            forced_indexer_topk=rows,
        )
