"""A choice that goes on after outputs that another engine has committed ends as if it had run undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.answers.resume import joined, split
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.requests.builder import build_request
from rayserve_moe.requests.fields import SGLANG
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from tests.pipelines.test_weight_updates import CHANGING
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcome, assert_same
from tests.support.engine.shared_settings import ONE_BUCKET

PROMPT = np.arange(3, 24, dtype=np.int32)
SEEDED = {"sampling_seed": 7, "max_new_tokens": 9, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling_params": {**SEEDED, "temperature": 0}},
    "sampled, penalties": {
        "sampling_params": {**SEEDED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
    },
    "choices, likeliest, scores": {
        "sampling_params": {**SEEDED, "n": 3},
        "top_logprobs_num": 2,
        "return_logprob": True,
        "logprob_start_len": 4,
    },
    "streamed rows": {"sampling_params": {**SEEDED, "n": 2}, "stream": True, "stream_routed_experts": True},
    "stream": {"sampling_params": SEEDED, "stream": True},
}


@dataclass
class OwnKeeper:
    """Keeps updates in this process; `committed` is what a lost engine has left."""

    committed: Sequence[ChoiceResult] = ()
    told: Sequence[int] = ()
    kept: dict[int, list[ChoiceResult]] = field(default_factory=dict)

    def keep(self, updates: list[ChoiceResult], deliver: Callable[[], object]) -> None:
        for update in updates:
            self.kept.setdefault(update.choice_index, []).append(replace(update, text=""))
        deliver()

    def all_of(self, choice: int) -> ChoiceResult:
        return joined([replace(update) for update in self.kept[choice]])


@pytest.fixture(scope="module")
def engine(engine_with: EngineStore) -> Iterator[Engine]:
    with engine_with.held(**ONE_BUCKET, **CHANGING) as engine:
        yield engine


def request_of(engine: Engine, case: dict[str, Any]) -> GenerationRequest:
    given = {"return_routed_experts": True, **case}
    given |= given.pop("sampling_params")
    return build_request(PROMPT, given, dialect=SGLANG, card=engine.card)


def run(engine: Engine, request: GenerationRequest, keeper: OwnKeeper | None = None) -> list[list[ChoiceResult]]:
    """The updates of every choice."""
    engine.flush_cache()
    updates: list[list[ChoiceResult]] = [[] for _ in range(request.sampling.n)]
    for update in GenerationStream(engine.loop, engine.tokenizer, request=request, keeper=keeper):
        updates[update.choice_index].append(replace(update))
    engine.loop.check_integrity()
    return updates


def whole_of(updates: list[ChoiceResult]) -> ChoiceResult:
    return joined([replace(update) for update in updates])


def assert_same_answers(found: list[list[ChoiceResult]], wanted: list[ChoiceResult], cuts: Sequence[int] = ()) -> None:
    """Choices are the same, to the bit before `cuts`; how rows came about does not count."""
    for updates, undisturbed, cut in zip(found, wanted, cuts or [0] * len(wanted), strict=True):
        whole = whole_of(updates)
        assert_same(outcome_of(whole), outcome_of(undisturbed))
        assert whole.logprobs[:cut] == undisturbed.logprobs[:cut]
        assert (whole.text, whole.ranks) == (undisturbed.text, undisturbed.ranks)
        assert whole.weight_versions == undisturbed.weight_versions
        assert whole.routing is not None and undisturbed.routing is not None
        assert whole.routing.start == undisturbed.routing.start
        assert whole.routing.weight_version == undisturbed.routing.weight_version


def outcome_of(result: ChoiceResult) -> Outcome:
    found = (result.token_ids, result.logprobs, result.finish, result.routing)
    return Outcome(*found, columns=result.columns, prompt=result.prompt)


@pytest.mark.parametrize("name", CASES)
def test_a_choice_that_is_cut_at_any_token_goes_on_as_it_was(engine, name):
    request = request_of(engine, CASES[name])
    wanted = [whole_of(updates) for updates in run(engine, request)]
    whole = OwnKeeper()
    assert_same_answers(run(engine, request, whole), wanted)
    lengths = [len(each.token_ids) for each in wanted]
    num_choices, prompt_len = request.sampling.n, len(PROMPT)
    for cut in range(lengths[0] + 1):
        cuts = [min(cut + 2 * choice, lengths[choice]) for choice in range(num_choices)]
        parts = [split(whole.all_of(choice), at, prompt_len=prompt_len) for choice, at in enumerate(cuts)]
        committed = [whole.all_of(i) if cuts[i] == lengths[i] else head for i, (head, _) in enumerate(parts)]
        told = [max(0, at - choice) for choice, at in enumerate(cuts)]
        keeper = OwnKeeper(committed, told)
        updates = run(engine, request, keeper)
        assert_same_answers(updates, wanted, cuts)
        if request.incremental:
            firsts = [len(each[0].token_ids) for each in updates]
            assert all(first == at for first, at in zip(firsts, told, strict=True) if at), "what was told is apart"
        for choice, at in enumerate(cuts):
            num_kept = sum(len(update.token_ids) for update in keeper.kept.get(choice, []))
            assert num_kept == lengths[choice] - at, "kept twice, or not"


def test_a_stop_string_is_found_across_the_cut(engine):
    text = run(engine, request_of(engine, CASES["greedy"]))[0][0].text
    stop = text[len(text) // 2 - 1 : len(text) // 2 + 2]
    sampling = {**SEEDED, "temperature": 0, "stop": (stop,)}
    request = request_of(engine, {"sampling_params": sampling, "stream": True, "stream_routed_experts": True})
    whole = OwnKeeper()
    wanted = whole_of(run(engine, request, whole)[0])
    assert wanted.finish is not None and wanted.finish.matched == stop and len(wanted.token_ids) < 9
    assert_same_answers(run(engine, request), [wanted])
    for cut in range(len(wanted.token_ids) + 1):
        head, _ = split(whole.all_of(0), cut, prompt_len=len(PROMPT))  # cut at the end: nobody has noted the stop
        for told in range(cut + 1):
            assert_same_answers(run(engine, request, OwnKeeper([head], [told])), [wanted], [cut])


def test_what_has_ended_is_answered_without_the_engine(engine):
    request = request_of(engine, CASES["streamed rows"])
    whole = OwnKeeper()
    wanted = [whole_of(updates) for updates in run(engine, request, whole)]
    before = engine.loop.statistics()["steps"]
    lengths = [len(each.token_ids) for each in wanted]
    for told in ([0, 0], [length + 1 for length in lengths]):
        keeper = OwnKeeper([whole.all_of(0), whole.all_of(1)], told)
        assert_same_answers(run(engine, request, keeper), wanted, lengths)
    assert engine.loop.statistics()["steps"] == before
