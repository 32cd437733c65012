"""Compare an engine over any family's checkpoint with the Hugging Face implementation: logits, greedy ids, routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayserve_moe import (
    Engine,
    extract_indexer_topk_from_meta_info,
    extract_routed_experts_from_meta_info,
    extract_router_gates_from_meta_info,
)
from rayserve_moe.model.spec import ModelSpec, RouterSpec
from tests.parity.family_reference import FamilyReference
from tests.parity.ling_reference import LingReference
from tests.parity.scored import Scored
from tests.support.models.full_logits import PromptOutputs, prompt_outputs_of

NUM_NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 6, 30, 47)
MAX_RELATIVE_DIFFERENCE = 1e-5
"""Allowed difference of float32 logits from float64, relative to the largest logit."""
MAX_OWN_DIFFERENCES = 2.0
"""Maximum ratio of our difference from float64 to the difference of transformers' float32 logits."""
RECURRENT = ("qwen3_next", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "nemotron_h", "granitemoehybrid")
"""Families with recurrent layers."""
RECURRENT_LENGTHS = (1, 30, 63, 64, 65, 128)
"""Prompt lengths of those: across the multiples of 64 tokens that states are kept at."""
SCALED_LATER = ("laguna", "minimax_m3", "step3p5")
"""Families whose factor multiplies the sum of the experts in transformers, not their weights."""
TIE_GAP = 1e-5

ENGINE: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "enable_return_router_gates": True,
    "dtype": "float32",
    "max_running_requests": 4,
    "num_pages": 64,
    "max_step_tokens": 32,
    "precompile_bs_paddings": [4],
}
"""Fewer tokens per step than the longest prompts, so that prompts are cut into chunks and mix with decoding."""


@dataclass(frozen=True)
class Reference:
    """Prompts, greedy ids after each, and what the reference computes in float64 for all but the last id."""

    prompts: list[list[int]]
    greedy_ids: list[list[int]]
    scored: list[Scored]
    selection_bias: np.ndarray
    own_difference: float
    """Difference of the reference's own float32 logits from float64, relative to the largest logit."""
    is_scaled_later: bool = False
    """Weights of the reference's routers are without the factor."""

    @property
    def size(self) -> float:
        """The largest logit."""
        return max(float(np.abs(one.logits).max()) for one in self.scored)

    @property
    def max_difference(self) -> float:
        """Allowed difference of our logits, relative to the largest."""
        return max_difference(self.own_difference)


def max_difference(own_difference: float) -> float:
    """Return the maximum difference of our float32 values from float64, given the difference of transformers' own.

    It is more than MAX_RELATIVE_DIFFERENCE where roundings are carried on: by recurrent states, with which transformers
    is 1e-4 from float64, and by attention without a factor.
    """
    return max(MAX_RELATIVE_DIFFERENCE, MAX_OWN_DIFFERENCES * own_difference)


def reference_of(reference: FamilyReference | LingReference, *, seed: int, case: str) -> Reference:
    """Run the reference of a case over prompts of PROMPT_LENGTHS, or of RECURRENT_LENGTHS for recurrent layers."""
    is_recurrent = case.startswith(RECURRENT)
    lengths = RECURRENT_LENGTHS if is_recurrent else PROMPT_LENGTHS
    # Other prompts for recurrent layers: with 78 a router of qwen3_next-0 chooses by 1.3e-7, and all after it changes.
    generator = np.random.default_rng([seed, 79 if is_recurrent else 78])
    prompts = [generator.integers(3, reference.vocab_size, size).tolist() for size in lengths]
    greedy_ids = [reference.greedy(prompt, count=NUM_NEW_TOKENS) for prompt in prompts]
    sequences = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, greedy_ids, strict=True)]
    scored = [reference.score(ids) for ids in sequences]
    return Reference(
        prompts,
        greedy_ids,
        scored,
        reference.selection_bias(),
        logit_difference([reference.own_logits(ids) for ids in sequences], scored),
        is_scaled_later=case.startswith(SCALED_LATER),
    )


def outputs_of(engine: Engine, reference: Reference) -> list[PromptOutputs]:
    """Compute every sequence of the reference on one device."""
    sequences = [[*p, *ids[:-1]] for p, ids in zip(reference.prompts, reference.greedy_ids, strict=True)]
    compiled = prompt_outputs_of(engine.runner, longest=max(map(len, sequences)))
    return [compiled(ids) for ids in sequences]


def logit_difference(found: Sequence[np.ndarray], scored: Sequence[Scored]) -> float:
    """Return the largest difference of any logit [T, V] of each sequence, relative to the largest logit."""
    differences = [float(np.abs(ours_TV - one.logits).max()) for ours_TV, one in zip(found, scored, strict=True)]
    return max(differences) / max(float(np.abs(one.logits).max()) for one in scored)


def differing_choices(rows: Sequence[np.ndarray | None], reference: Reference) -> tuple[int, int]:
    """Count the choices of an index that differ from the reference's, and all choices; AssertionError where no tie.

    `rows` are the choices of every sequence, [T, I, K], ascending with -1 behind.
    """
    num_differing = num_choices = 0
    for found_TIK, one in zip(rows, reference.scored, strict=True):
        if one.tokens_ITK is None:
            continue
        assert found_TIK is not None and found_TIK.shape[:2] == one.tokens_ITK.shape[1::-1]
        for layer, theirs_TK in enumerate(one.tokens_ITK):
            for position, theirs in enumerate(theirs_TK):
                ours, wanted = found_TIK[position, layer], np.sort(theirs[(theirs >= 0) & (theirs <= position)])
                num_choices += 1
                if not np.array_equal(ours[ours >= 0], wanted):
                    num_differing += 1
                    gap = choice_gap(one.index_scores_ITT[layer, position], len(wanted))
                    assert gap < TIE_GAP, f"layer {layer} of an index, position {position}: no tie, but {gap}"
    return num_differing, num_choices


def choice_gap(scores_T: np.ndarray, count: int) -> float:
    """Score gap between the last of `count` chosen positions and the next one, relative to the largest score."""
    ranked = -np.sort(-scores_T)
    largest = float(np.abs(ranked[:count][np.isfinite(ranked[:count])]).max())
    return float(ranked[count - 1] - ranked[count]) / largest


def answers_of(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Greedy continuations of all prompts in one batch, with routing and log-probs."""
    sampling = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return engine.generate(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params=sampling,
        return_routed_experts=True,
        return_indexer_topk=engine.card.index is not None,
        return_router_gates=True,
        return_logprob=True,
    )


def index_rows_of(answers: Sequence[dict[str, Any]]) -> list[np.ndarray | None]:
    """Return the index rows of answers, [T, I, K] each; None for answers without any.

    Layers that share an index repeat its row. A layer has a row for each head of its index, one after another.
    """
    found: list[np.ndarray | None] = []
    for answer in answers:
        if (info := answer["meta_info"].get("indexer_topk_info")) is None:
            found.append(None)
            continue
        own = np.flatnonzero(np.isin(info["layer_ids"], info["indexer_layer_ids"]))
        rows = extract_indexer_topk_from_meta_info(answer)
        sources = np.searchsorted(own, np.arange(rows.shape[1]), side="right") - 1
        np.testing.assert_array_equal(rows, rows[:, own][:, sources])
        found.append(rows[:, own])
    return found


def assert_same_answers(answers: list[dict[str, Any]], reference: Reference) -> None:
    """Ids are equal, and log-probs follow from logits that differ by the reference's `max_difference`."""
    assert [answer["output_ids"] for answer in answers] == reference.greedy_ids
    for answer, one in zip(answers, reference.scored, strict=True):
        logits = one.logits[-NUM_NEW_TOKENS:].astype(np.float64)
        wanted = logits.max(-1) - np.logaddexp.reduce(logits, axis=-1)
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * reference.max_difference * reference.size)


def differing_rows(answers: list[dict[str, Any]], reference: Reference, spec: ModelSpec) -> tuple[int, int]:
    """How many routing rows hold other experts than the reference's, and of how many; AssertionError where no tie."""
    num_differing = num_rows = 0
    for answer, one in zip(answers, reference.scored, strict=True):
        flat = extract_routed_experts_from_meta_info(answer)
        rows = flat.reshape(len(one.logits), spec.num_layers, spec.router.top_k)
        assert not np.delete(rows, spec.moe_layer_ids, axis=1).any(), "dense layers are filled with zeros"
        found = np.sort(rows[:, list(spec.moe_layer_ids)], axis=-1)
        differs = (found != np.sort(one.chosen, axis=-1)).any(-1)
        gaps = selection_gaps(one.router_logits, reference.selection_bias, spec.router)
        assert not (differs & (gaps >= TIE_GAP)).any(), f"{differs.sum()} of {differs.size} router rows differ"
        ids = rows[:, list(spec.moe_layer_ids)]
        assert_gates_are_described(answer, ids, one.router_logits, spec.router)
        factor = spec.router.scale if reference.is_scaled_later else 1.0
        assert_gates_are_of(answer, ids, one, is_same=~differs, factor=factor)
        num_differing, num_rows = num_differing + int(differs.sum()), num_rows + differs.size
    return num_differing, num_rows


def assert_gates_are_of(
    answer: dict[str, Any], ids_TMK: np.ndarray, one: Scored, *, is_same: np.ndarray, factor: float
) -> None:
    """Gates are the weights of the reference's router times `factor`, where `is_same` says that experts are equal."""
    gates = extract_router_gates_from_meta_info(answer)
    found, wanted = (
        np.take_along_axis(weights, np.argsort(ids, axis=-1), axis=-1)[is_same]
        for weights, ids in ((gates, ids_TMK), (factor * one.weights, one.chosen))
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * float(np.abs(wanted).max()))


def assert_gates_are_described(
    answer: dict[str, Any], ids_TMK: np.ndarray, logits_TME: np.ndarray, router: RouterSpec
) -> None:
    """Gates are the reference's scores of the experts, as their description says: normalised, then scaled."""
    gates, info = extract_router_gates_from_meta_info(answer), answer["meta_info"]["router_gates_info"]
    logits = logits_TME.astype(np.float64)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    scores = {"sigmoid": 1 / (1 + np.exp(-logits)), "softmax": exponents / exponents.sum(-1, keepdims=True)}
    wanted = np.take_along_axis(scores[info["score"]], ids_TMK, axis=-1)
    if info["normalized"]:
        total = wanted.sum(-1, keepdims=True)
        wanted = wanted / np.maximum(total, router.renormalize_floor)
    if info["expert_factors"]:  # they are parameters, which the description does not have
        return
    np.testing.assert_allclose(gates, wanted * info["scale"], rtol=0, atol=1e-4 * info["scale"])


def selection_gaps(logits_TME: np.ndarray, bias_ME: np.ndarray, router: RouterSpec) -> np.ndarray:
    """How far from another choice each row is [T, M]: by the last expert chosen, or the last group kept."""
    logits = logits_TME.astype(np.float64)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    scores = 1 / (1 + np.exp(-logits)) if router.score == "sigmoid" else exponents / exponents.sum(-1, keepdims=True)
    scores = scores + (bias_ME if router.selection_bias else 0)
    gaps = np.full(scores.shape[:-1], np.inf)
    if router.num_groups > router.groups_kept:
        groups = np.sort(scores.reshape(*scores.shape[:-1], router.num_groups, -1), axis=-1)
        of_group = groups[..., -2:].sum(-1) if router.group_score == "top2_sum" else groups[..., -1]
        ranked = -np.sort(-of_group, axis=-1)
        gaps = ranked[..., router.groups_kept - 1] - ranked[..., router.groups_kept]
        is_kept = of_group >= ranked[..., router.groups_kept - 1, None]
        scores = np.where(np.repeat(is_kept, groups.shape[-1], axis=-1), scores, -np.inf)
    ranked = -np.sort(-scores, axis=-1)
    if router.top_k == router.num_experts:
        return gaps
    return np.minimum(gaps, ranked[..., router.top_k - 1] - ranked[..., router.top_k])
