"""The trainer side: transformers in float32, choosing experts itself or by the rows that it is given."""

# B sequences   T fed tokens   V vocabulary   M MoE layers   K experts per token

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

TIE_GAP = 1e-5
"""Ranks whose probabilities lie closer may change places between two float32 programs."""

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Trainer:
    """An independent implementation of the model, in float32, on the processor.

    Replay gives the selection alone: weights come from the live router scores at the given ids, renormalised as the
    model does, so that a router trained this way keeps its gradient.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Load it. Its products are small: torch gets one thread, for more would wait for each other by spinning."""
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        ).eval()
        self._routers = [layer.mlp.gate for layer in self._model.model.layers if hasattr(layer.mlp, "gate")]

    def logprobs(self, token_ids: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Log-probs [B, T, V] of the token after each of [B, T]; with `rows` [B, T, M, K] under that routing."""
        return self._run(token_ids, lambda layer: _force(rows[:, :, layer]) if rows is not None else None)

    def selection(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What its own routers choose: rows [B, T, M, K] in falling order, and the least gap of ranks [B, T, M]."""
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        def keep(router: Qwen3MoeTopKRouter, _inputs: tuple, outputs: RouterOutput) -> None:
            probabilities = torch.softmax(outputs[0], dim=-1, dtype=torch.float32).numpy()
            probabilities = probabilities.reshape(*token_ids.shape, -1)
            order = np.argsort(-probabilities, axis=-1, kind="stable")[..., : router.top_k + 1]
            ranked = np.take_along_axis(probabilities, order, axis=-1)
            seen.append((order[..., :-1], -np.diff(ranked, axis=-1).max(axis=-1)))

        self._run(token_ids, lambda _layer: keep)
        rows, gaps = zip(*seen, strict=True)
        return np.stack(rows, axis=2), np.stack(gaps, axis=2)

    @torch.no_grad()
    def _run(self, token_ids: np.ndarray, hook_of: Callable[[int], Callable | None]) -> np.ndarray:
        hooks = [(router, hook_of(layer)) for layer, router in enumerate(self._routers)]
        handles = [router.register_forward_hook(hook) for router, hook in hooks if hook is not None]
        try:
            logits = self._model(torch.from_numpy(token_ids), use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return torch.log_softmax(logits, dim=-1).numpy()


def _force(ids_BTK: np.ndarray) -> Callable[[Qwen3MoeTopKRouter, tuple, RouterOutput], RouterOutput]:
    """Return a hook that puts the given ids in the place of a router's own."""
    forced = torch.from_numpy(ids_BTK.reshape(-1, ids_BTK.shape[-1]).astype(np.int64))

    def replace(router: Qwen3MoeTopKRouter, _inputs: tuple, outputs: RouterOutput) -> RouterOutput:
        logits = outputs[0]
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, forced)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), forced

    return replace
