"""A new output per token: `margin`, the scripted edit of docs/add_an_output.md."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from benchmarks.edits.sampling_parameter import PROMPT, SAMPLING, SETTINGS
from benchmarks.edits.scratch import Edit, Insertion
from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.fleet.journal_records import committed_in, packed_update
from rayserve_moe.inprocess.arguments import prompts_from, requests_from
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

EDIT = Edit(
    {
        "requests/records.py": (
            Insertion(
                '''    """Return the entropy at every output."""
''',
                '''    return_margin: bool = stated(False, FLAG, openai=None, vllm=None)
    """Return the difference of the log-probs of the two likeliest tokens at every output."""
''',
            ),
        ),
        "requests/columns.py": (
            Insertion(
                '"return_entropy", "output_token_entropy"),\n',
                '    "margin": OutputColumn('
                '"evidence", np.float32, _flag("return_margin"), "return_margin", "output_token_margin"),\n',
            ),
        ),
        "decoding/evidence.py": (
            Insertion("    entropy_S: jax.Array\n", "    margin_S: jax.Array\n"),
            Insertion(
                "    own_S = log_prob_of(logprobs_SV, ids_S, part=part)\n",
                "    best_SJ = likeliest(logprobs_SV, num_wanted=jnp.int32(2), max_top=2, part=part).logprobs_SJ\n",
            ),
            Insertion(
                "        entropy_S=entropy_of(logprobs_SV, part=part),\n",
                "        margin_S=best_SJ[:, 0] - best_SJ[:, 1],\n",
            ),
            Insertion(
                """            "entropy": of_logits.entropy_S,
""",
                """            "margin": of_logits.margin_S,
""",
            ),
        ),
    }
)
OPTIONS = {"return_margin": True, "return_logprob": True, "top_logprobs_num": 2}


def observe() -> dict[str, Any]:
    """Return `margins` by where they were read, the log-probs of the two `likeliest` tokens, and fields of others."""
    with Engine("synthetic:tiny", **SETTINGS) as engine:
        whole = engine.generate(PROMPT, SAMPLING, **OPTIONS)
        *_, streamed = engine.generate_stream(PROMPT, SAMPLING, **OPTIONS)
        others = engine.generate(PROMPT, SAMPLING, return_entropy=True)
        assert isinstance(whole, dict) and isinstance(others, dict), "one prompt has one answer"
        return {
            "likeliest": [[value for value, _, _ in pair] for pair in whole["meta_info"]["output_top_logprobs"]],
            "margins": {
                "engine": whole["meta_info"]["output_token_margin"],
                "stream": streamed["meta_info"]["output_token_margin"],
                "journal": _read_from_journal(engine),
                "http": asyncio.run(_read_over_http(engine)),
            },
            "others": sorted(others["meta_info"]),
        }


def _read_from_journal(engine: Engine) -> list[float]:
    """Return the margins of a streamed request whose updates went through the records of the journal."""
    prompts = prompts_from(engine.tokenizer, PROMPT, input_ids=None)
    (request,) = requests_from(prompts, SAMPLING, keywords=OPTIONS, card=engine.card, streams=True)
    records = [packed_update(0, each) for each in GenerationStream(engine.loop, engine.tokenizer, request=request)]
    (result,) = committed_in(records, 1)
    return result.columns["margin"].tolist()


async def _read_over_http(engine: Engine) -> list[float]:
    api = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    body = {"text": PROMPT, "sampling_params": SAMPLING, **OPTIONS}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here", timeout=600) as client:
        answer = await client.post("/generate", json=body)
    answer.raise_for_status()
    return answer.json()["meta_info"]["output_token_margin"]
