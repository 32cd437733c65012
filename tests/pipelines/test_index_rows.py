"""Index rows of sparse attention: answers hold what the indexes chose, and a replay of them is the same run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rayserve_moe import Engine, extract_indexer_topk_from_meta_info, extract_routed_experts_from_meta_info
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.requests.records import RequestError
from rayserve_moe.scheduling import rank_step
from rayserve_moe.scheduling.step_plan import MAX_FORCED_CHOICES, StepPlan, StepResult
from tests.support.engine.shared_settings import INDEXED
from tests.support.models.families import FAMILY_CASES, family_case, write_family
from tests.support.models.full_logits import prompt_outputs_of

CASE = family_case("glm_moe_dsa-1")
TOP_K, LAYERS, WITH_INDEX = CASE.config["index_topk"], [0, 1, 2], [0, 2]
PROMPTS = [np.random.default_rng(length).integers(3, 100, length).tolist() for length in (5, 40, 70)]
REPLAYED = {"max_new_tokens": 0, "temperature": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(CASE, tmp_path_factory.mktemp("index") / "model", seed=5)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(str(checkpoint), **INDEXED) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[dict]:
    """Greedy continuations by 20 tokens, with every row."""
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    rows = {"return_routed_experts": True, "return_indexer_topk": True}
    return engine.generate(input_ids=PROMPTS, sampling_params=sampling, **rows)


def read_by(prompt: list[int], answer: dict) -> list[int]:
    """The tokens that have rows: all but the last."""
    return [*prompt, *answer["output_ids"]][:-1]


def experts_of(engine: Engine, answer: dict) -> np.ndarray:
    layout = engine.card.routing
    flat = extract_routed_experts_from_meta_info(answer).reshape(-1, layout.num_hidden_layers, layout.top_k)
    return flat[:, list(layout.layer_ids)]


def test_rows_are_what_the_model_chooses(engine: Engine, answers: list[dict]):
    """They ascend with -1 behind: all tokens of a short context, and `index_topk` of a longer one."""
    outputs_of = prompt_outputs_of(engine.runner, longest=96)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        rows, info = extract_indexer_topk_from_meta_info(answer), answer["meta_info"]["indexer_topk_info"]
        ids = read_by(prompt, answer)
        assert rows.shape == (len(ids), len(LAYERS), TOP_K) and info["missing"] == []
        assert info["layer_ids"] == LAYERS and info["indexer_layer_ids"] == WITH_INDEX
        counts = np.minimum(np.arange(len(ids)) + 1, TOP_K)[:, None].repeat(len(LAYERS), 1)
        np.testing.assert_array_equal((rows >= 0).sum(-1), counts)
        chosen_ITK = outputs_of(ids).chosen_ITK
        assert chosen_ITK is not None
        np.testing.assert_array_equal(rows[:, WITH_INDEX], chosen_ITK.swapaxes(0, 1))
        np.testing.assert_array_equal(rows[:, 0], rows[:, 1])
    assert (extract_indexer_topk_from_meta_info(answers[2])[-1] != np.arange(TOP_K)).any()


def replayed(engine: Engine, answers: list[dict], index: list[Any]) -> list[np.ndarray]:
    """Log-probs of the tokens of answers as prompts, with forced experts and choices."""
    found = engine.generate(
        input_ids=[[*prompt, *answer["output_ids"]] for prompt, answer in zip(PROMPTS, answers, strict=True)],
        sampling_params=REPLAYED,
        return_logprob=True,
        logprob_start_len=0,
        forced_routed_experts=[answer["meta_info"]["routed_experts"] for answer in answers],
        forced_indexer_topk=index,
        return_indexer_topk=True,
    )
    return [
        np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], np.float64)
        for answer in found
    ]


def test_a_replay_has_the_log_probs_of_the_run_and_an_altered_choice_is_seen(engine: Engine, answers: list[dict]):
    """A token that sees its own position only, in one layer, has another log-prob, and those before it do not."""
    encoded = [answer["meta_info"]["indexer_topk"] for answer in answers]
    free = replayed(engine, answers, [None] * 3)
    same = replayed(engine, answers, encoded)
    for ours, theirs in zip(same, free, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    altered = [extract_indexer_topk_from_meta_info(answer) for answer in answers]
    for rows, position in zip(altered, (3, 30, 70), strict=True):
        rows[position, :2] = [position] + [-1] * (TOP_K - 1)
    changed = replayed(engine, answers, altered)
    for ours, theirs, position in zip(changed, free, (3, 30, 70), strict=True):
        np.testing.assert_allclose(ours[:position], theirs[:position], rtol=0, atol=1e-5)
        assert abs(ours[position] - theirs[position]) > 1e-3


def test_packed_rows_are_the_same_and_can_be_forced(engine: Engine, answers: list[dict]):
    asked = {"sampling_params": REPLAYED, "return_indexer_topk": True, "indexer_topk_format": "packed"}
    found = engine.generate(input_ids=PROMPTS, **asked)
    for answer, prompt, whole in zip(found, PROMPTS, answers, strict=True):
        assert isinstance(answer["meta_info"]["indexer_topk"], dict)
        rows = extract_indexer_topk_from_meta_info(answer)
        np.testing.assert_array_equal(rows, extract_indexer_topk_from_meta_info(whole)[: len(prompt)])
    forced = {"forced_routed_experts": experts_of(engine, answers[1])[: len(PROMPTS[1])]}
    index = {"forced_indexer_topk": found[1]["meta_info"]["indexer_topk"]}
    again = engine.generate(input_ids=PROMPTS[1], **asked, **forced, **index)
    assert again["meta_info"]["indexer_topk"] == found[1]["meta_info"]["indexer_topk"]


def test_forced_choices_come_back_as_rows(engine: Engine, answers: list[dict]):
    rows = extract_indexer_topk_from_meta_info(answers[1])
    rows[35] = -1
    rows[35, :, :3] = [2, 7, 30]
    (found,) = engine.generate(
        input_ids=[[*PROMPTS[1], *answers[1]["output_ids"]]],
        sampling_params=REPLAYED,
        forced_routed_experts=[answers[1]["meta_info"]["routed_experts"]],
        forced_indexer_topk=[rows],
        return_indexer_topk=True,
    )
    np.testing.assert_array_equal(extract_indexer_topk_from_meta_info(found)[: len(rows)], rows)


@pytest.mark.slow
def test_four_devices_choose_and_replay_as_one(engine: Engine, answers: list[dict], checkpoint: Path):
    """Two data ranks of two devices: prompts of a batch, and their forced choices, are on either."""
    spread = {**INDEXED, "devices_per_host": 4, "data_parallel_size": 2}
    rows = [extract_indexer_topk_from_meta_info(answer) for answer in answers]
    altered = [each.copy() for each in rows]
    for each in altered:
        each[3:, 2] = -1
        each[3:, 2, 0] = np.arange(3, len(each))
    wanted = replayed(engine, answers, altered)
    with Engine(str(checkpoint), **spread) as mesh:
        sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
        found = mesh.generate(input_ids=PROMPTS, sampling_params=sampling, return_indexer_topk=True)
        for answer, theirs, before in zip(found, answers, rows, strict=True):
            assert answer["output_ids"] == theirs["output_ids"]
            np.testing.assert_array_equal(extract_indexer_topk_from_meta_info(answer), before)
        for ours, theirs in zip(replayed(mesh, answers, altered), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_step_takes_its_most_forced_choices(checkpoint: Path):
    with Engine(str(checkpoint), **INDEXED | {"max_step_tokens": 512}) as engine:
        assert_spread(engine, MAX_FORCED_CHOICES)


def test_more_choices_than_a_step_can_force_are_spread_over_steps(engine: Engine):
    with patch.object(rank_step, "MAX_FORCED_CHOICES", 20):
        assert_spread(engine, 20)


def assert_spread(engine: Engine, limit: int) -> None:
    """Force two prompts at once whose tokens would fit into fewer steps."""
    prompts = [np.random.default_rng(length).integers(3, 100, length).tolist() for length in (300, 170)]
    planned: list[int] = []
    free = engine.generate(
        input_ids=prompts, sampling_params=REPLAYED, return_routed_experts=True, return_indexer_topk=True
    )
    chosen = [extract_indexer_topk_from_meta_info(answer) for answer in free]
    for rows, prompt in zip(chosen, prompts, strict=True):
        rows[:] = -1
        rows[:, :, 0] = np.arange(len(prompt))[:, None]
    execute = engine.runner.execute

    def recording(plan: StepPlan) -> StepResult | None:
        forced = plan.block_work.forced_index
        planned.append(0 if forced is None else int(np.count_nonzero(forced.lengths)))
        return execute(plan)

    with patch.object(engine.runner, "execute", recording):
        found = engine.generate(
            input_ids=prompts,
            sampling_params=REPLAYED,
            forced_routed_experts=[answer["meta_info"]["routed_experts"] for answer in free],
            forced_indexer_topk=chosen,
            return_indexer_topk=True,
        )
    for answer, rows in zip(found, chosen, strict=True):
        np.testing.assert_array_equal(extract_indexer_topk_from_meta_info(answer), rows)
    assert sum(planned) == 470 and max(planned) == limit


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({(0, 2, 0): 4}, "row 0 must hold ascending positions up to 0"),
        ({(4, 2, 3): 2}, "no entry may appear twice in a row"),
        ({(0, 2, 0): -1}, "every row needs an entry"),
        ({(4, 2, 4): -2}, "entries must be at least 0"),
        ({(4, 1, 4): -1}, "layers that share an index must have the same rows"),
    ],
)
def test_choices_that_no_index_makes_are_refused(
    engine: Engine, answers: list[dict], changed: dict[tuple[int, ...], int], message: str
):
    rows = extract_indexer_topk_from_meta_info(answers[0])[:5]
    for place, value in changed.items():
        rows[place] = value
    with pytest.raises(RequestError, match=f"forced_indexer_topk|{re.escape(message)}") as refused:
        engine.generate(
            input_ids=PROMPTS[0],
            sampling_params=REPLAYED,
            forced_routed_experts=experts_of(engine, answers[0])[:5],
            forced_indexer_topk=rows,
        )
    assert message in str(refused.value) and refused.value.param == "forced_indexer_topk"


def test_choices_need_experts_of_the_same_positions(engine: Engine, answers: list[dict]):
    rows = extract_indexer_topk_from_meta_info(answers[0])[:4]
    with pytest.raises(RequestError, match="needs forced_routed_experts"):
        engine.generate(input_ids=PROMPTS[0], sampling_params=REPLAYED, forced_indexer_topk=rows)
    with pytest.raises(RequestError, match=r"must hold integers of shape \[5, 3, 24\], found \[4, 3, 24\]"):
        engine.generate(
            input_ids=PROMPTS[0],
            sampling_params=REPLAYED,
            forced_routed_experts=experts_of(engine, answers[0])[:5],
            forced_indexer_topk=rows,
        )


@pytest.mark.slow
def test_a_server_of_short_contexts_keeps_no_index_keys(engine: Engine, checkpoint: Path):
    """It answers alike: all tokens before one are within the choice. Without capture, it says how to get rows."""
    short = {**INDEXED, "enable_return_indexer_topk": False, "max_model_len": TOP_K, "page_size": 8}
    sampling = {"max_new_tokens": 15, "temperature": 0, "ignore_eos": True}
    wanted = engine.generate(input_ids=PROMPTS[0], sampling_params=sampling)["output_ids"]
    with Engine(str(checkpoint), **short) as plain:
        assert "index_keys" not in plain.runner.state.pools and "index_keys" in engine.runner.state.pools
        assert plain.generate(input_ids=PROMPTS[0], sampling_params=sampling)["output_ids"] == wanted
        with pytest.raises(RequestError, match="enable_return_indexer_topk"):
            plain.generate(input_ids=PROMPTS[0], sampling_params=REPLAYED, return_indexer_topk=True)


def test_a_model_without_an_index_has_no_rows(tmp_path: Path):
    other = write_family(FAMILY_CASES[0], tmp_path / "other", seed=5)
    with pytest.raises(SettingsError, match="qwen3_moe has no sparse attention with an index"):
        Engine(str(other), **INDEXED)
