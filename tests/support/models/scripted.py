"""A checkpoint that writes what a script says: every token has one that follows it, whatever came before.

Layers add nothing to their input, so that logits depend on the last token alone; experts are routed as ever.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import EOS_ID
from tests.support.engine.shared_settings import SERVED, write_served

FIRST_ID = 300
SURE = 50.0
MODEL = "scripted"
"""The checkpoint that tests of chats serve."""
SCRIPTS = {
    "a": [
        *("<think>", "\nI nee", "d f.\n", "</think>", "\n\nLet me", " see.", "\n<tool", "_call>\n"),
        *('{"name": "f", "argu', 'ments": {"n": 5, "s": "é <b>"}}', "\n</tool_call>\n"),
        *('<tool_call>{"name":"g"}</tool_', "call>"),
    ],
    "b": ["<tool_call>", '{"name": "f", ', '"arguments": {"n":5 }}', "</tool_call>"],
    "c": ['Done.<tool_call>{"name": ', "oops}", "</tool_ca", "ll>"],
    "d": ["Reasons </thi", "nk> and", " more"],
}
SPECIAL, MARKERS = ["<tool_call>", "</tool_call>"], ["<think>", "</think>"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} in <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role ~ ': ' ~ (m.content or '') }}"
    "{% if m.reasoning_content %}{{ '(</think>' ~ m.reasoning_content ~ ')' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{{ reasoning_effort or '' }}{{ 'off' if enable_thinking is false }}"
    "{{ 'assistant: ' ~ (script or 'a') }}"
)


@contextmanager
def scripted_engine(directory: Path, **settings: Any) -> Generator[Engine]:
    """Run an engine whose chats write what SCRIPTS say: by default it reasons, then calls two tools."""
    path = write_scripted(directory / MODEL, SCRIPTS, template=TEMPLATE, special=SPECIAL, markers=MARKERS)
    with Engine(model_path=str(path), **SERVED | settings) as engine:
        yield engine


def write_scripted(
    directory: Path,
    scripts: Mapping[str, Sequence[str]],
    *,
    template: str,
    special: Sequence[str] = (),
    markers: Sequence[str] = (),
) -> Path:
    """Write a checkpoint that answers a prompt that ends in a script's character with the tokens of the script.

    No two tokens may be alike. `special` are those that are special ones, `markers` those that are read as one token
    without being special.
    """
    path = write_served(directory)
    ids = {piece: FIRST_ID + i for i, piece in enumerate(piece for script in scripts.values() for piece in script)}
    assert len(ids) == sum(map(len, scripts.values()))
    vocabulary = _rename(path / "tokenizer.json", ids, special=special, markers=markers)
    (path / "chat_template.jinja").write_text(template)
    after = {
        one: other
        for start, script in scripts.items()
        for one, other in zip([vocabulary[start], *map(ids.get, script)], [*map(ids.get, script), EOS_ID], strict=True)
    }
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    embedding = weights["model.embed_tokens.weight"]
    head = np.zeros_like(weights["lm_head.weight"])
    for one, other in after.items():
        head[other] += SURE * embedding[one] / np.linalg.norm(embedding[one]) / np.sqrt(embedding.shape[1])
    weights["lm_head.weight"] = head
    weights["model.norm.weight"] = np.ones_like(weights["model.norm.weight"])
    save_file(weights, path / "model.safetensors")
    return path


def _rename(file: Path, ids: Mapping[str, int], *, special: Sequence[str], markers: Sequence[str]) -> dict[str, int]:
    """Give tokens new texts; returns the vocabulary."""
    written = json.loads(file.read_text())
    vocabulary = written["model"]["vocab"]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for piece, token_id in ids.items():
        del vocabulary[f"<id_{token_id}>"]
        vocabulary["".join(word for word, _ in spell(piece))] = token_id
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for tokens, is_special in ((special, True), (markers, False)):
        flags["special"] = is_special
        written["added_tokens"] += [{"id": ids[token], "content": token, **flags} for token in tokens]
    file.write_text(json.dumps(written))
    return vocabulary
