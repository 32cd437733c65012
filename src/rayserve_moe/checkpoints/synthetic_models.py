"""Random models of any family: the config as data, and how weights are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rayserve_moe.checkpoints.synthetic_tokenizer import SPECIAL_IDS


@dataclass(frozen=True)
class Drawn:
    """How weights are drawn; biases and sinks as other weights."""

    scale: float = 0.02
    """Standard deviation of weights, which are normal."""
    norm_jitter: float = 0.0
    """Standard deviation of the normal noise of norms, which are one plus that."""
    router_skew: float = 0.0
    """Standard deviation of a lognormal factor of each expert's router weights: some are chosen far more."""


@dataclass(frozen=True)
class SyntheticModel:
    """A random model of any family."""

    config: Mapping[str, Any]
    """Its `config.json`, but for the dtype and the ids of special tokens, which are added."""
    drawn: Drawn = Drawn()

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    def recipe(self) -> dict[str, Any]:
        """Return all that the checkpoint follows from besides seed and dtype."""
        return {"config": dict(self.config), **asdict(self.drawn)}

    def hf_config(self, dtype: str) -> dict[str, Any]:
        """Return `config.json`."""
        return {**self.config, "dtype": dtype, "initializer_range": self.drawn.scale, "use_cache": True, **SPECIAL_IDS}
