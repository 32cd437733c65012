"""Seeded random checkpoints of any family with a tokenizer, for tests and for a first start without a download.

The same configuration, seed and dtype give the same bytes: each tensor is drawn from the seed and its own name.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, CheckpointError
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.checkpoints.synthetic_presets import FAMILY_CONFIGS
from rayserve_moe.checkpoints.synthetic_tokenizer import MIN_VOCAB_SIZE, SPECIAL_IDS, write_tokenizer
from rayserve_moe.config.given_files import GivenFileError, read_json_object
from rayserve_moe.model.draft_spec import draft_parameters, prediction_spec
from rayserve_moe.model.family_table import family_of, prediction_rules_of
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files

MARKER_FILE = "synthetic.json"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Drawn:
    """The random distribution of weights; biases and sinks are drawn like other weights."""

    scale: float = 0.02
    """Standard deviation of weights, which are normal."""
    norm_jitter: float = 0.0
    """Standard deviation of the normal noise that is added to norms of 1."""
    router_skew: float = 0.0
    """Standard deviation of a lognormal factor of each expert's router weights: some experts are chosen far more often.
    """


@dataclass(frozen=True)
class SyntheticModel:
    """A random model of any family."""

    config: Mapping[str, Any]
    """Its `config.json` without the dtype and the ids of special tokens, which are added."""
    drawn: Drawn = Drawn()

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    def recipe(self) -> dict[str, Any]:
        """Return everything that determines the checkpoint besides seed and dtype."""
        return {"config": dict(self.config), **asdict(self.drawn)}

    def hf_config(self, dtype: str) -> dict[str, Any]:
        """Return `config.json`."""
        return {**self.config, "dtype": dtype, "initializer_range": self.drawn.scale, "use_cache": True, **SPECIAL_IDS}


@dataclass(frozen=True)
class DenseLayers:
    """Layers without experts, under the names of `config.json`."""

    decoder_sparse_step: int = 1
    """Interval of layers with experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Further layers without experts."""


@dataclass(frozen=True)
class Constants:
    """Numbers of rotation and norms, under the names of `config.json`."""

    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class SyntheticConfig:
    """Sizes of a random Qwen3-MoE model, under the names of `config.json`, and the distribution of its weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    dense: DenseLayers = DenseLayers()
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    constants: Constants = Constants()
    drawn: Drawn = field(default_factory=Drawn)

    def recipe(self) -> dict[str, Any]:
        """Return everything that determines the checkpoint besides seed and dtype: sizes, then the distribution of
        weights.
        """
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            found |= value if isinstance(value, dict) else {name: value}
        return found

    def hf_config(self, dtype: str) -> dict[str, Any]:
        """Return `config.json`."""
        sizes = {name: value for name, value in self.recipe().items() if name not in asdict(self.drawn)}
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": dtype,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.drawn.scale,
            "use_cache": True,
            **SPECIAL_IDS,
            **sizes,
        }


PRESETS = {
    # 1.9 M parameters: goldens and unit tests
    "tiny": SyntheticConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=2,
    ),
    # 114 M parameters
    "small": SyntheticConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4,
    ),
    # 972 M parameters
    "mid": SyntheticConfig(
        vocab_size=16384, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=384, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=64, num_experts_per_tok=8,
    ),
}  # fmt: skip
FAMILY_PRESETS = {name: SyntheticModel(config) for name, config in FAMILY_CONFIGS.items()}
"""By the name that follows `synthetic:`."""


def ensure_checkpoint(directory: str | Path, preset: str = "tiny", *, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """Return `directory` with the preset's checkpoint; write it if it does not exist or has other parameters.

    Safe to call from several processes of a machine at once. Raises CheckpointError for an unknown preset, or if the
    directory holds anything that this module did not write.
    """
    presets = PRESETS | FAMILY_PRESETS
    if preset not in presets:
        raise CheckpointError(f"no synthetic preset {preset!r}; known: {', '.join(presets)}")
    return write_checkpoint(directory, presets[preset], seed=seed, dtype=dtype)


def write_checkpoint(
    directory: str | Path,
    model: SyntheticConfig | SyntheticModel,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 2**30,
) -> Path:
    """Write the checkpoint of `model` unless `directory` holds it already; return the directory.

    It is built in a temporary directory and renamed, so that an interrupted call leaves no partial checkpoint. More
    than `max_shard_bytes` of tensors become an indexed set of files.
    """
    _check(model, dtype, max_shard_bytes)
    recipe = {"config": model.recipe(), "seed": seed, "dtype": dtype, "max_shard_bytes": max_shard_bytes}
    recipe = json.loads(json.dumps(recipe))
    target = Path(directory).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock"):
        if _recipe_of(target) != recipe:
            partial = target.parent / f".{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write_json(partial / CONFIG_FILE, model.hf_config(dtype))
            _write_json(partial / "generation_config.json", SPECIAL_IDS)
            _write_weights(partial, model, seed=seed, dtype=dtype, max_shard_bytes=max_shard_bytes)
            write_tokenizer(partial, model.vocab_size)
            _write_json(partial / MARKER_FILE, recipe)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    return target


def _check(model: SyntheticConfig | SyntheticModel, dtype: str, max_shard_bytes: int) -> None:
    if dtype not in DTYPES:
        raise CheckpointError(f"synthetic checkpoints have dtype {' or '.join(DTYPES)}, not {dtype!r}")
    if model.vocab_size < MIN_VOCAB_SIZE:
        raise CheckpointError(f"vocab_size {model.vocab_size} is below the {MIN_VOCAB_SIZE} of the byte tokenizer")
    if max_shard_bytes <= 0:
        raise CheckpointError(f"max_shard_bytes must be positive, not {max_shard_bytes}")


@contextmanager
def _locked(file: Path) -> Generator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _recipe_of(target: Path) -> dict[str, Any] | None:
    """Read the recipe that the directory was written from; None if it is absent or empty."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        return read_json_object(target / MARKER_FILE)
    except GivenFileError as error:
        raise CheckpointError(f"{target}: exists, is not a synthetic checkpoint, and is not overwritten") from error


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    directory: Path, model: SyntheticConfig | SyntheticModel, *, seed: int, dtype: str, max_shard_bytes: int
) -> None:
    config = model.hf_config(dtype)
    family = family_of(config)
    spec = family.spec_from_hf(config)
    tree = parameters_in_files(parameter_specs(spec, dtype=dtype), family.CHECKPOINT_RULES, spec=spec)
    places = tensor_places(tree, family.CHECKPOINT_RULES)
    if config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers"):
        places |= tensor_places(draft_parameters(prediction_spec(spec), dtype=dtype), prediction_rules_of(config))
    specs = {name: place.spec for name, (place, *_) in places.items()}
    groups = _shard_groups({name: _num_bytes(spec, dtype) for name, spec in specs.items()}, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        shard_name = SINGLE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            name: _draw(name, specs[name], model, seed).astype(_stored_dtype(specs[name], dtype)) for name in names
        }
        save_file(tensors, directory / shard_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, shard_name)
    if len(groups) > 1:
        num_bytes = sum(_num_bytes(spec, dtype) for spec in specs.values())
        _write_json(directory / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _stored_dtype(spec: ParamSpec, dtype: str) -> np.dtype:
    """Return the checkpoint's dtype, or float32 for biases that select experts, as in published files."""
    return DTYPES["float32" if spec.role == "selection_bias" else dtype]


def _num_bytes(spec: ParamSpec, dtype: str) -> int:
    return int(np.prod(spec.file_shape)) * _stored_dtype(spec, dtype).itemsize


def _shard_groups(sizes: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Cut the names, in order, into runs of at most `max_shard_bytes`; a larger tensor gets its own run."""
    groups: list[list[str]] = [[]]
    free = max_shard_bytes
    for name, num_bytes in sizes.items():
        if num_bytes > free and groups[-1]:
            groups.append([])
            free = max_shard_bytes
        groups[-1].append(name)
        free -= num_bytes
    return groups


def _draw(name: str, spec: ParamSpec, model: SyntheticConfig | SyntheticModel, seed: int) -> np.ndarray:
    """Draw a tensor in float32, file orientation."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(spec.file_shape, dtype=np.float32)
    if spec.initial == "ones":
        return np.float32(1) + np.float32(model.drawn.norm_jitter) * values
    if spec.initial == "zeros":
        return np.float32(model.drawn.norm_jitter) * values
    if spec.initial == "log_decay":  # rates from about 0.01 to 3: some heads remember many tokens
        return np.float32(1.5) * values - np.float32(2)
    if spec.role == "router" and model.drawn.router_skew:
        values *= generator.lognormal(sigma=model.drawn.router_skew, size=(len(values), 1)).astype(np.float32)
    return np.multiply(values, np.float32(model.drawn.scale), out=values)
