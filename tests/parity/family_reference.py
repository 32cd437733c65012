"""The Hugging Face implementation of any family in float32: random checkpoints, logits, greedy ids, routing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from tests.parity.ling_reference import LingReference
from tests.parity.scored import Scored
from tests.support.family_cases import FamilyCase

_ROUTERS = ("TopKRouter", "TopkRouter", "MoEV1Gate")


class FamilyReference:
    """A random model of a case, with every norm, bias, sink and selection bias away from its initial value."""

    def __init__(self, case: FamilyCase) -> None:
        config = AutoConfig.for_model(case.family, **copy.deepcopy(case.config))
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.vocab_size: int = config.vocab_size
        _perturb(self.model, torch.Generator().manual_seed(case.variant + 1))

    def save(self, directory: Path) -> Path:
        """Write the checkpoint in the published names, with a tokenizer."""
        self.model.save_pretrained(directory)
        write_tokenizer(directory, self.vocab_size)
        return directory

    def selection_bias(self) -> np.ndarray:
        """What is added to scores to choose, float32 [M, E]; [0] where nothing is."""
        arrays = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        found = [array for name, array in arrays.items() if name.endswith("e_score_correction_bias")]
        return np.stack([array.detach().numpy().reshape(-1) for array in found]) if found else np.zeros(1, np.float32)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Scored:
        """Run all positions of one sequence at once."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(_router: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
            seen.append((outputs[0].float(), outputs[2]))

        hooks = [
            module.register_forward_hook(keep)
            for module in self.model.modules()
            if type(module).__name__.endswith(_ROUTERS)
        ]
        try:
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()
        finally:
            for hook in hooks:
                hook.remove()
        assert seen and len(seen) == len(hooks), "every router ran once"
        return Scored(
            logits, np.stack([found[0].numpy() for found in seen], 1), np.stack([found[1].numpy() for found in seen], 1)
        )

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], *, count: int) -> list[int]:
        """Continue `prompt` by `count` greedy tokens."""
        ids = torch.tensor([list(prompt)])
        answer = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=-1
        )
        return answer[0, len(prompt) :].tolist()


def reference_model(case: FamilyCase) -> FamilyReference | LingReference:
    """The implementation to compare a case with: that of transformers, where it has one."""
    return FamilyReference(case) if case.family in CONFIG_MAPPING else LingReference(case)


@torch.no_grad()
def _perturb(model: PreTrainedModel, generator: torch.Generator) -> None:
    arrays = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("bias")
    }
    for name, array in arrays.items():
        drawn = torch.randn(array.shape, generator=generator)
        if "norm" in name.rsplit(".", 2)[-2]:
            array.copy_(1 + 0.2 * drawn)
        elif name.endswith(("bias", "sinks", "_bias")):
            array.copy_((0.1 if "correction" in name else 0.3) * drawn)
        else:
            array.copy_(0.12 * drawn)
