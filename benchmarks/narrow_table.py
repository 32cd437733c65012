"""What experts in 8 bits change of answers, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table

TITLES = ("mean KL", "largest KL", "other top-1 tokens", "other sets of experts", "right answers")


def narrow_experts(measured: Mapping[str, Any]) -> str:
    """Render a table for each model, with a row for each way; answers of random models are not right or wrong."""
    return "\n\n".join(_table(model, found) for model, found in measured.items())


def _table(model: str, found: Mapping[str, Mapping[str, float]]) -> str:
    shares = ("other_tokens", "other_sets", *(("right",) if model == "calculator" else ()))
    rows = [
        [name, f"{of['mean_kl']:.1e}", f"{of['largest_kl']:.1e}", *(f"{of[key]:.2%}" for key in shares)]
        for name, of in found.items()
    ]
    tokens, token_layers = (next(iter(found.values()))[key] for key in ("tokens", "token_layers"))
    title = f"{model}: {tokens:,} tokens, {token_layers:,} token-layers"
    return markdown_table([title, *TITLES[: 2 + len(shares)]], rows)
