"""A new sampling parameter: `top_a`, the scripted edit of docs/add_a_request_flag.md."""

from __future__ import annotations

from typing import Any

from benchmarks.edits.scratch import Edit, Insertion
from rayserve_moe import Engine
from rayserve_moe.requests.records import SamplingParams

EDIT = Edit(
    {
        "requests/records.py": (
            Insertion(
                '''    """Minimum probability of kept tokens, relative to the likeliest token."""
''',
                '''    top_a: float = stated(0.0, number(0, 1))
    """Tokens kept are at least this likely, relative to the squared probability of the likeliest one."""
''',
            ),
        ),
        "scheduling/step_plan.py": (Insertion("    min_p: Any = 0.0\n", "    top_a: Any = 0.0\n"),),
        "decoding/truncation.py": (
            Insertion(
                '''    min_p_S: jax.Array
    """float32; 0 keeps all."""
''',
                '''    top_a_S: jax.Array
    """float32; 0 keeps all."""
''',
            ),
            Insertion(" | (limits.min_p_S > 0.0)", " | (limits.top_a_S > 0.0)"),
            Insertion(
                "    min_prob_S = limits.min_p_S * largest_S\n",
                "    min_prob_S = jnp.maximum(min_prob_S, limits.top_a_S * largest_S**2)\n",
            ),
        ),
    }
)
TOP_A = 0.9
SETTINGS: dict[str, Any] = {
    "max_running_requests": 4,
    "max_step_tokens": 32,
    "precompile_bs_paddings": [4],
    "max_model_len": 128,
    "num_pages": 32,
}
SAMPLING = {"temperature": 0.1, "max_new_tokens": 40, "sampling_seed": 5, "ignore_eos": True}
"""At this temperature the tiny model is neither flat nor greedy."""
PROMPT = "one two three"


def observe() -> dict[str, Any]:
    """Return `plain` outputs; if the package knows `top_a`, outputs `with_top_a` and the `masks` of its truncation."""
    found: dict[str, Any] = {}
    with Engine("synthetic:tiny", **SETTINGS) as engine:
        found["plain"] = _outputs(engine, {})
        if hasattr(SamplingParams(), "top_a"):
            found["with_top_a"] = _outputs(engine, {"top_a": TOP_A})
            answer = engine.generate(PROMPT, {**SAMPLING, "top_a": TOP_A}, return_sampling_mask=True)
            assert isinstance(answer, dict), "one prompt has one answer"
            found["masks"] = answer["meta_info"]["output_token_sampling_mask"]
    return found


def _outputs(engine: Engine, params: dict[str, float]) -> list[dict[str, Any]]:
    """Return the id and the log-prob of each output, and the log-probs of the 20 likeliest tokens by id."""
    answer = engine.generate(PROMPT, SAMPLING | params, return_logprob=True, top_logprobs_num=20)
    assert isinstance(answer, dict), "one prompt has one answer"
    meta = answer["meta_info"]
    return [
        {"id": token_id, "logprob": logprob, "likeliest": [(i, value) for value, i, _ in likeliest]}
        for (logprob, token_id, _), likeliest in zip(
            meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
        )
    ]
