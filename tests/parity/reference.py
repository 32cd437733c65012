"""Run the Hugging Face implementation in float32: greedy ids, logits, and what each router chose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.parity.cases import NUM_NEW_TOKENS, Golden, ParityCase, prompts_of, sha256_of_weights


def run_reference(case: ParityCase, checkpoint: Path) -> Golden:
    """Compute the Golden of a case from its checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    ).eval()
    routers = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    prompts = prompts_of(case)
    greedy_ids, logits, chosen, gaps = [], [], [], []
    for prompt in prompts:
        new_ids = _greedy(model, prompt)
        all_logits, probabilities = _score(model, routers, [*prompt, *new_ids[:-1]])
        step_logits = all_logits[len(prompt) - 1 :]
        assert step_logits.argmax(-1).tolist() == new_ids, "greedy ids with and without a KV cache differ"
        prompt_chosen, prompt_gaps = _select(probabilities, case.config.num_experts_per_tok)
        greedy_ids.append(new_ids)
        logits.append(step_logits)
        chosen.append(prompt_chosen)
        gaps.append(prompt_gaps)
    return Golden(
        weights_sha256=np.array(sha256_of_weights(checkpoint)),
        layer_ids=np.array(sorted(routers), np.int32),
        prompts=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        greedy_ids=np.array(greedy_ids, np.int32),
        logits=np.stack(logits),
        routed_experts=np.concatenate(chosen).astype(np.uint8),
        gaps=np.concatenate(gaps),
    )


@torch.no_grad()
def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=None,
        max_new_tokens=NUM_NEW_TOKENS,
        eos_token_id=-1,
    )
    return answer[0, len(prompt) :].tolist()


@torch.no_grad()
def _score(
    model: PreTrainedModel, routers: dict[int, Qwen3MoeTopKRouter], token_ids: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Run all positions at once: logits [T, V], and router probabilities [T, M, E]."""
    seen: list[np.ndarray] = []

    def keep(_router: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
        seen.append(torch.softmax(outputs[0], dim=-1, dtype=torch.float32).numpy())

    hooks = [router.register_forward_hook(keep) for router in routers.values()]
    try:
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == len(routers), "every router ran once"
    return logits, np.stack(seen, axis=1)


def _select(probabilities: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Order by descending probability, ties to the smaller id: ids [T, M, k] and the smallest gap [T, M]."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=-1)
    gaps = ranked[..., :top_k] - ranked[..., 1 : top_k + 1]
    return order[..., :top_k], gaps.min(axis=-1)
