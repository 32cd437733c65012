"""The Hugging Face implementation of any family: random checkpoints, logits, greedy ids, routing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from tests.parity.float64 import in_float64, no_float32
from tests.parity.ling_reference import LingReference
from tests.parity.scored import Scored
from tests.support.models.families import FamilyCase

torch.set_num_threads(1)
"""Models are too small for more: threads would wait for each other longer than they compute."""

_ROUTERS = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "MoEV1Gate", "Gemma4TextRouter")
_PROBABILITIES = ("Gemma4TextRouter",)
"""Routers that return the softmax of their logits."""
_WITHOUT_CACHE = ("nemotron_h",)
"""Models whose single tokens transformers computes without the bound of steps that their prompts have."""
_SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")
_MULTIMODAL = {"step3p5": ("step3p7", {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14})}
"""The multimodal model of a language model that has no class of its own, and the sizes of its vision tower."""


class FamilyReference:
    """A model of transformers with float32 weights; it generates in float32 and scores in float64."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.vocab_size: int = model.config.get_text_config().vocab_size

    @cached_property
    def exact(self) -> PreTrainedModel:
        """The model in float64."""
        return in_float64(self.model)

    def save(self, directory: Path) -> Path:
        """Write the checkpoint in the published names, with a tokenizer."""
        self.model.save_pretrained(directory)
        write_tokenizer(directory, self.vocab_size)
        return directory

    def selection_bias(self) -> np.ndarray:
        """What is added to scores to choose, float32 [M, E]; [0] where nothing is."""
        arrays = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        found = [array for name, array in arrays.items() if name.endswith(_SELECTION_BIASES)]
        return np.stack([array.detach().numpy().reshape(-1) for array in found]) if found else np.zeros(1, np.float32)

    def score(self, token_ids: Sequence[int]) -> Scored:
        """Run all positions of one sequence at once in float64."""
        exact = self.exact
        with no_float32():
            return score(exact, [token_ids])

    def own_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits that transformers computes in float32 [T, V]."""
        return score(self.model, [token_ids]).logits

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], *, count: int) -> list[int]:
        """Continue `prompt` by `count` greedy tokens."""
        ids = torch.tensor([list(prompt)])
        answer = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=-1,
            use_cache=self.model.config.model_type not in _WITHOUT_CACHE,
        )
        return answer[0, len(prompt) :].tolist()


def random_model(config: PreTrainedConfig, kind: Any = AutoModelForCausalLM, *, seed: int) -> PreTrainedModel:
    """A random model, with every norm, bias, sink and selection bias away from its initial value."""
    model: PreTrainedModel = kind.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    perturb(model, torch.Generator().manual_seed(seed), width=config.get_text_config().hidden_size)
    return model


def reference_model(case: FamilyCase) -> FamilyReference | LingReference:
    """The implementation to compare a case with: that of transformers, where it has one."""
    if case.family not in CONFIG_MAPPING:
        return LingReference(case)
    config = AutoConfig.for_model(case.family, **copy.deepcopy(case.config))
    if case.family in _MULTIMODAL:
        whole, vision = _MULTIMODAL[case.family]
        config = AutoConfig.for_model(whole, text_config=config.to_dict(), vision_config=vision)
    is_listed = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForCausalLM if is_listed else AutoModelForImageTextToText
    return FamilyReference(random_model(config, kind, seed=case.variant + 1))


def routers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """In the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith(_ROUTERS)]


@torch.no_grad()
def score(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Scored:
    """Run all positions of sequences of one length at once; they follow each other in what is returned."""
    seen: list[tuple[torch.Tensor, ...]] = []
    tokens: list[torch.Tensor] = []

    def keep(router: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
        scores = outputs[0].float()
        weights = outputs[1] if outputs[1].shape == outputs[2].shape else outputs[1].gather(-1, outputs[2])
        seen.append((scores.log() if type(router).__name__ in _PROBABILITIES else scores, outputs[2], weights.float()))

    def keep_tokens(_index: torch.nn.Module, _inputs: tuple, outputs: torch.Tensor) -> None:
        for each, kept in ((outputs, tokens), (ranked[-1], index_scores)):
            by_head = each if each.ndim == 4 else each[:, None]
            kept.append(by_head.transpose(0, 1).flatten(1, 2))

    routers = routers_of(model)
    hooks = [router.register_forward_hook(keep) for router in routers]
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    hooks += [index.register_forward_hook(keep_tokens) for index in indexers]
    index_scores: list[torch.Tensor] = []
    try:
        with ranked_scores() as ranked:
            logits = model(torch.tensor([list(ids) for ids in sequences]), use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    assert seen and len(seen) == len(routers) and len(tokens) == len(indexers), "every router and index ran once"
    router_logits, chosen, weights = (np.stack([found[i].numpy() for found in seen], 1) for i in range(3))
    tokens_ITK, scores_ITT = (
        np.concatenate([each.numpy() for each in kept]) if kept else None for kept in (tokens, index_scores)
    )
    return Scored(logits.flatten(0, 1).numpy(), router_logits, chosen, weights, tokens_ITK, scores_ITT)


@contextmanager
def ranked_scores() -> Iterator[list[torch.Tensor]]:
    """Collect every tensor that `Tensor.topk` is asked about: the last thing that an index does is to rank scores."""
    ranked: list[torch.Tensor] = []
    topk = torch.Tensor.topk

    def recording(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ranked.append(scores)
        return topk(scores, *args, **kwargs)

    with patch.object(torch.Tensor, "topk", recording):
        yield ranked


@torch.no_grad()
def perturb(model: torch.nn.Module, generator: torch.Generator, *, width: int) -> None:
    """Draw all parameters and biases anew; products are of inputs of about `width` elements."""
    arrays = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith(("bias", "layer_scalar"))
    }
    for name, array in arrays.items():
        drawn = torch.randn(array.shape, generator=generator)
        if "norm" in name.rsplit(".", 2)[-2]:
            array.copy_(1 + 0.2 * drawn)
        elif name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
            # The router divides by the root of the width.
            array.copy_((width**0.5 if name.endswith("router.scale") else 1.0) * (1 + 0.2 * drawn))
        elif name.endswith(("bias", "sinks", "_bias")):
            array.copy_((0.1 if name.endswith(_SELECTION_BIASES) else 0.3) * drawn)
        else:
            array.copy_(0.96 * width**-0.5 * drawn)
