"""Ways to lay a model out, and placements to move its experts to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, placement_from


@dataclass(frozen=True)
class Spread:
    """Data ranks by tensor ranks, and how experts lie over all of them."""

    data: int
    tensor: int
    backend: str = "auto"
    num_redundant: int = 0
    shuffled: bool = False

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}-{self.backend}-R{self.num_redundant}{'-shuffled' * self.shuffled}"


SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1), (1, 8)]
"""Data by tensor ranks: either alone and both, up to the eight devices of the test process."""


def random_placement(like: ExpertPlacement, seed: int) -> ExpertPlacement:
    """Every expert somewhere and some of them more often, no rank holding one twice, with shares of any size."""
    generator = np.random.default_rng(seed)
    experts = np.stack([_random_layer(like, generator) for _ in range(like.num_layers)])
    shares = generator.uniform(0.2, 1.0, experts.shape)
    for layer, of_layer in enumerate(experts):
        shares[layer] /= np.bincount(of_layer, weights=shares[layer])[of_layer]
    return placement_from(experts, shares, num_experts=like.num_experts, ep_size=like.ep_size)


def _random_layer(like: ExpertPlacement, generator: np.random.Generator) -> np.ndarray:
    while True:
        extra = generator.choice(like.num_experts, like.num_redundant, replace=False)
        experts = generator.permutation(np.concatenate([np.arange(like.num_experts), extra]))
        by_rank = np.sort(experts.reshape(like.ep_size, -1), axis=1)
        if (by_rank[:, 1:] != by_rank[:, :-1]).all():
            return experts
