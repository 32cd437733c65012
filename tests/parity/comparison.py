"""Compare an engine's answers with a Golden, by laws that leave no room but float32 rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rayserve_moe import Engine, extract_routed_experts_from_meta_info
from tests.parity.cases import NUM_NEW_TOKENS, Golden, ParityCase, prompts_of, rows_per_prompt

MAX_LOGIT_DIFFERENCE = 1e-4
TIE_GAP = 1e-5
MAX_TIED_FRACTION = 1e-3

PromptLogits = Callable[[Sequence[int]], np.ndarray]
"""Token ids of one sequence to its logits, float32 [T, V]."""


def generate_answers(engine: Engine, case: ParityCase) -> list[dict[str, Any]]:
    """Ask an engine for the case's greedy continuations, all prompts in one batch, with routing and log-probs."""
    return engine.generate(
        input_ids=prompts_of(case),
        sampling_params={"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        return_routed_experts=True,
        return_logprob=True,
    )


def assert_same_ids(golden: Golden, answers: list[dict[str, Any]]) -> None:
    """Greedy ids are the reference's, every one."""
    assert [answer["output_ids"] for answer in answers] == golden.greedy_ids.tolist()


def assert_same_logprobs(golden: Golden, answers: list[dict[str, Any]]) -> None:
    """Log-probs of the greedy ids follow from the reference's logits."""
    logits = golden.logits.astype(np.float64)
    wanted = logits.max(-1) - np.logaddexp.reduce(logits, axis=-1)
    found = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=MAX_LOGIT_DIFFERENCE)


def assert_same_routing(golden: Golden, answers: list[dict[str, Any]], num_layers: int) -> None:
    """Every routing row is the reference's, order included, but for rows whose ranks tie within float32.

    A row is one token in one layer. Rows that differ must tie, and be fewer than MAX_TIED_FRACTION.
    """
    top_k = golden.routed_experts.shape[-1]
    found = np.zeros(golden.routed_experts.shape, np.int32)
    for answer, rows in zip(answers, rows_per_prompt(), strict=True):
        flat = extract_routed_experts_from_meta_info(answer)
        assert flat.size == (rows.stop - rows.start) * num_layers * top_k, "one row per position but the last"
        every_layer = flat.reshape(rows.stop - rows.start, num_layers, top_k)
        assert not np.delete(every_layer, golden.layer_ids, axis=1).any(), "dense layers are filled with zeros"
        found[rows] = every_layer[:, golden.layer_ids]
    differs = (found != golden.routed_experts).any(-1)
    assert not (differs & (golden.gaps >= TIE_GAP)).any(), f"{differs.sum()} of {differs.size} router rows differ"
    assert differs.mean() < MAX_TIED_FRACTION


def assert_same_logits(golden: Golden, case: ParityCase, prompt_logits: PromptLogits) -> None:
    """Logits from the last prompt position on are the reference's within MAX_LOGIT_DIFFERENCE."""
    for position, prompt in enumerate(prompts_of(case)):
        token_ids = [*prompt, *golden.greedy_ids[position, :-1].tolist()]
        found = prompt_logits(token_ids)[len(prompt) - 1 :]
        np.testing.assert_allclose(found, golden.logits[position], rtol=0, atol=MAX_LOGIT_DIFFERENCE)
