"""The three checkpoints that are compared, their prompts, and the golden files. No torch here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from rayserve_moe.checkpoints.synthetic import Constants, DenseLayers, Drawn, SyntheticConfig, write_checkpoint

GOLDENS = Path(__file__).parent / "goldens"
PROMPT_LENGTHS = (1, 2, 5, 17, 40, 64, 111, 200)
NUM_NEW_TOKENS = 24


@dataclass(frozen=True)
class ParityCase:
    """A checkpoint by configuration and seed. Weights are large enough that attention and routing are not flat."""

    name: str
    config: SyntheticConfig
    seed: int


CASES = (
    ParityCase(
        "all_moe",
        SyntheticConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=16,
            num_experts_per_tok=4,
            drawn=Drawn(scale=0.1, norm_jitter=0.2),
        ),
        seed=1,
    ),
    ParityCase(
        "mixed_layers",
        SyntheticConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=192,
            moe_intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            dense=DenseLayers(decoder_sparse_step=2, mlp_only_layers=(3,)),
            drawn=Drawn(scale=0.1, norm_jitter=0.2),
        ),
        seed=2,
    ),
    ParityCase(
        "tied_embeddings",
        SyntheticConfig(
            vocab_size=512,
            hidden_size=96,
            intermediate_size=160,
            moe_intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=24,
            num_experts=12,
            num_experts_per_tok=3,
            tie_word_embeddings=True,
            constants=Constants(rope_theta=1e4),
            drawn=Drawn(scale=0.1, norm_jitter=0.2),
        ),
        seed=3,
    ),
)


@dataclass(frozen=True)
class Golden:
    """What the reference computed for one case; P prompts, G new tokens, V vocabulary, M MoE layers.

    `prompts` int32 [sum of PROMPT_LENGTHS]; `greedy_ids` int32 [P, G]; `logits` float32 [P, G, V], from the last
    prompt position on. Routing has one row per position of prompt + new tokens but the last, prompts in turn:
    `routed_experts` uint8 [rows, M, k], and `gaps` float32 [rows, M], the smallest difference of router probability
    between neighbouring ranks 1 .. k + 1.
    """

    weights_sha256: np.ndarray
    layer_ids: np.ndarray
    prompts: np.ndarray
    greedy_ids: np.ndarray
    logits: np.ndarray
    routed_experts: np.ndarray
    gaps: np.ndarray


def make_checkpoint(case: ParityCase, directory: Path) -> Path:
    """Write the case's float32 checkpoint below `directory`."""
    return write_checkpoint(directory / case.name, case.config, seed=case.seed, dtype="float32")


def sha256_of_weights(checkpoint: Path) -> str:
    """Digest of all safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def prompts_of(case: ParityCase) -> list[list[int]]:
    """Draw the case's prompts: one of each length, any id but the three special ones."""
    generator = np.random.default_rng([case.seed, 77])
    return [generator.integers(3, case.config.vocab_size, size).tolist() for size in PROMPT_LENGTHS]


def rows_per_prompt() -> list[slice]:
    """Where the routing rows of each prompt lie in a Golden."""
    ends = np.cumsum([size + NUM_NEW_TOKENS - 1 for size in PROMPT_LENGTHS])
    starts = [0, *ends[:-1]]
    return [slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


def save_golden(case: ParityCase, golden: Golden) -> Path:
    """Write the committed file of a case."""
    file = GOLDENS / f"{case.name}.npz"
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **{field.name: getattr(golden, field.name) for field in fields(Golden)})
    return file


def load_golden(case: ParityCase) -> Golden:
    """Read the committed file of a case."""
    with np.load(GOLDENS / f"{case.name}.npz") as arrays:
        return Golden(**{field.name: arrays[field.name] for field in fields(Golden)})
