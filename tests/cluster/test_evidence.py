"""What is looked at, processed and left by truncation is the same over two hosts as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.cluster.replica_engine import start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.requests.records import GenerationRequest, ListedInPrompt, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.support.engine.outputs import assert_same_columns, assert_same_prompt

CLOSE = {"rtol": 0, "atol": 3e-5}
ASKED: dict[str, Any] = {
    **SETTINGS,
    "structured_output": True,
    "enable_return_hidden_states": True,
    "logit_processors": "examples.logit_processors",
}


def asking() -> list[GenerationRequest]:
    generator, requests = np.random.default_rng(1), []
    for i, length in enumerate((1, 33, 50, 70)):
        prompt = generator.integers(3, 500, length).astype(np.int32)
        arguments = (("top_n_sigma", 1.5),) if i % 2 else ()
        sampling = SamplingParams(
            max_new_tokens=8, temperature=0.9, seed=i, top_k=20, ignore_eos=True, processor_arguments=arguments
        )
        listed = ListedInPrompt(0, generator.integers(0, 500, (length - 1, 3)).astype(np.int32))
        request = GenerationRequest(f"e{i}", prompt, sampling, return_hidden_states=("all", "last", "all", "")[i])
        asked = replace(request, logprob_token_ids=(3, 5, 499), return_sampling_mask=True, return_entropy=True)
        requests.append(replace(asked, listed_in_prompt=listed))
    return requests


def answers(loop: EngineLoop, tokenizer: Tokenizer) -> list[ChoiceResult]:
    streams = [GenerationStream(loop, tokenizer, request=request) for request in asking()]
    results = [ChoiceResult() for _ in streams]
    for stream, result in zip(streams, results, strict=True):
        for delta in stream:
            result.add(delta)
    loop.check_integrity()
    return results


@pytest.mark.slow
def test_two_hosts_find_what_one_process_does(raylets: int, checkpoint: Path) -> None:
    with Engine(str(checkpoint), **ASKED) as engine:
        expected = answers(engine.loop, engine.tokenizer)
    wide = {"num_hosts": 2, "devices_per_host": 2, "data_parallel_size": 2}
    group = start_replica_engine(settings_from({"model_path": str(checkpoint), **ASKED, **wide}))
    try:
        found = answers(group.loop, group.tokenizer)
    finally:
        group.shutdown()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, **CLOSE)
        assert {"entropy", "listed_logprobs", "mask_ids"} <= ours.columns.keys()
        assert_same_columns(ours.columns, theirs.columns)
        assert ours.prompt is not None and "listed_logprobs" in ours.prompt.columns
        assert_same_prompt(ours.prompt, theirs.prompt)


def test_a_replica_with_a_wrong_module_reserves_nothing(checkpoint: Path) -> None:
    values = {"model_path": str(checkpoint), **ASKED, "logit_processors": "no.such.module"}
    with pytest.raises(SettingsError, match="cannot be loaded"):
        start_replica_engine(settings_from(values))
