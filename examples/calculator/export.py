"""A Hugging Face directory of the trained model: config, bfloat16 weights, a byte tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.calculator.network import Weights
from examples.calculator.problems import END
from rayserve_moe.checkpoints.files import CONFIG_FILE, SINGLE_FILE, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.model.families.qwen3_moe import ARCHITECTURE, CHECKPOINT_RULES, spec_from_hf
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec

PAD = "\0"
SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": ord(END), "pad_token_id": ord(PAD)}
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    **SPECIAL_IDS,
}

# A user's turn is a problem, with `=` added where it lacks, and the answer follows at once: `37+45=82`, one per line.
# So a turn's prompt, its answer and the end token are a prefix of the next turn's prompt. System messages add nothing.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set text = (message['content'] or '') | replace(' ', '') %}"
    "{% if message['role'] == 'user' %}"
    "{{ text }}{% if not text.endswith('=') %}={% endif %}"
    "{% elif message['role'] in ['assistant', 'tool'] %}"
    "{{ text }}{{ eos_token }}"
    "{% elif message['role'] != 'system' %}"
    "{{ raise_exception('unknown role') }}"
    "{% endif %}"
    "{% endfor %}"
)


def model_spec() -> ModelSpec:
    """The architecture that is trained."""
    return spec_from_hf(CONFIG)


def write_directory(directory: Path, weights: Weights) -> None:
    """Write everything that serving and transformers need into `directory`, which may exist."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in ((CONFIG_FILE, CONFIG), ("generation_config.json", {**SPECIAL_IDS, "do_sample": False})):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    places = tensor_places(parameter_specs(model_spec(), dtype="bfloat16"), CHECKPOINT_RULES)
    tensors = {}
    for name, (place,) in places.items():
        group, member = place.path
        values = np.asarray(weights[group][member][place.stack_index], np.float32)
        # A view of the transpose would be written in the order of its memory.
        values = values.T if place.spec.file.transposed else values
        tensors[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    (directory / SINGLE_FILE).chmod(0o644)
    write_tokenizer(directory)


def read_weights(directory: Path) -> tuple[Weights, ModelSpec]:
    """Read such a directory back into float32 weights, and its architecture."""
    files = open_checkpoint(directory)
    spec = spec_from_hf(files.config)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = parameter_specs(spec, dtype="float32")
    return load_parameters(WeightSource(files, CHECKPOINT_RULES), tree, sharding_of=lambda _: here), spec


def rounded(weights: Weights) -> Weights:
    """The weights as bfloat16 holds them, in float32."""
    return jax.tree.map(lambda values: values.astype(jnp.bfloat16).astype(jnp.float32), weights)


def write_tokenizer(directory: Path) -> None:
    """Save the tokenizer whose ids are bytes: 256 of them, the newline ends an answer and the zero byte pads.

    These two stand in the vocabulary as themselves, not in the byte-level alphabet: the library looks for special
    tokens in plain text.
    """
    vocabulary = {character: byte for byte, character in enumerate(_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def _alphabet() -> list[str]:
    """The characters that stand for bytes 0 to 255: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    characters[ord(END)], characters[ord(PAD)] = END, PAD
    return characters
