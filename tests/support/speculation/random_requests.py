"""Random requests of every kind, for runs with drafts that must come to what runs without them do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rayserve_moe import Engine
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.kernels.table import CPU_INVARIANT, CPU_NATIVE
from rayserve_moe.requests.reasoning_span import ReasoningMarkers, ThinkingLimit
from rayserve_moe.requests.records import (
    Constraint,
    GenerationRequest,
    ListedInPrompt,
    RoutedExperts,
    RoutingLayout,
    SamplingParams,
)
from rayserve_moe.requests.retention import Retention
from tests.support.engine.outputs import LOGPROB_TOLERANCE, Outcomes, assert_identical, assert_same
from tests.support.engine.run_requests import Intervention, Way, preempt_every, run_together
from tests.support.engine.workload import draw_prompt
from tests.support.models.core import CORE_CONFIG
from tests.support.speculation.oracle_proposer import Oracle
from tests.support.text.constraints import PERSON, compiler, schema_constraint

NUM_STEMS = 3
LONGEST_STEM = 40
ROWS, DRAFTS = 4, 3
SPECULATES: dict[str, Any] = {
    "max_running_requests": ROWS,
    "max_step_tokens": 64,
    "precompile_bs_paddings": [ROWS],
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": DRAFTS,
    "structured_output": True,
    "enable_return_hidden_states": True,
    "enable_audit": True,
    "hidden_state_layers": [0, 2, 3],
    "logit_processors": "examples.logit_processors",
}
CONSTRAINTS = (
    schema_constraint(PERSON),
    Constraint("regex", "([a-d]{3} ){2,6}"),
    Constraint("choice", '["one", "two", "three hundred"]'),
    Constraint("grammar", 'root ::= ("x" | "yz" | root "!")'),
    Constraint(
        "structural_tag", '{"structures": [{"begin": "a", "schema": {"enum": [1]}, "end": "z"}], "triggers": ["a"]}'
    ),
)
PROCESSED = ((("top_n_sigma", 0.8),), (("no_repeat_ngram", 2),), (("no_repeat_ngram", 3), ("top_n_sigma", 2.0)))
"""Arguments of logit processors."""
PLAIN = Way(num_rows=ROWS, step_tokens=64, chunk_tokens=64, constraints=compiler())
TOLERANCE = 1e-6
"""Of log-probs, absolute, and again relative: XLA adds up float32 in another order in other compiled shapes."""
VOCAB_SIZE = CORE_CONFIG.vocab_size


def is_exact(engine: Engine) -> bool:
    """Return True if a row's bits depend on nothing but the row."""
    return engine.runner.config.kernels.name in (CPU_INVARIANT.name, CPU_NATIVE.name)


def assert_unchanged(engine: Engine, actual: Outcomes, plain: Outcomes) -> None:
    """Assert that runs with and without drafts agree: by native kernels in all bits."""
    if is_exact(engine):
        assert_identical(actual, plain, routing=False)
    assert actual.keys() == plain.keys()
    for key, outcome in actual.items():
        assert_same(outcome, plain[key], routing=plain[key].routing is not None)
        bound = TOLERANCE if outcome.tolerance == LOGPROB_TOLERANCE else outcome.tolerance
        np.testing.assert_allclose(outcome.logprobs, plain[key].logprobs, rtol=bound, atol=bound)


def max_drafts(engine: Engine) -> int:
    """Drafts of a sequence in a step."""
    return engine.runner.served.settings.speculation.max_drafts


def random_way(engine: Engine, generator: np.random.Generator, plain: Outcomes, **always: Any) -> Way:
    """Some way to schedule, with drafts that are right more or less often."""
    oracle = Oracle(plain, share=float(generator.choice([0.3, 0.8, 0.95, 1.0])), vocab_size=VOCAB_SIZE)
    preempts = preempt_every(int(generator.integers(17, 25)), forgets=bool(generator.random() < 0.5))
    way = replace(
        PLAIN,
        chunk_tokens=int(generator.choice([7, 64])),
        num_pages=int(generator.choice([29, 60, 200])),
        intervene=preempts if generator.random() < 0.5 else None,
        caches_prefixes=bool(generator.random() < 0.8),
        proposer=oracle,
        num_drafts=int(generator.choice([1, max_drafts(engine)])),
    )
    return replace(way, **always)


def check_mix(
    engine: Engine,
    seed: int,
    *,
    count: int,
    eplb: EplbSteps | None = None,
    intervene: Intervention | None = None,
) -> None:
    """Drafts alone do not show; nor do they beside preemptions and other chunks, which are held to `assert_same`.

    With `eplb` experts move as `intervene` says in all runs but the plain one.
    """
    requests, generator = random_requests(seed, count=count, layout=engine.card.routing), np.random.default_rng(seed)
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    always = {} if eplb is None else {"eplb": eplb, "intervene": intervene}
    way = random_way(engine, generator, plain, **always)
    alone = {"proposer": way.proposer, "num_drafts": max_drafts(engine)}
    drafts_alone = replace(PLAIN, **alone, eplb=eplb, intervene=intervene)
    assert_unchanged(engine, run_together(engine.runner, engine.card, requests, way=drafts_alone), plain)
    found = run_together(engine.runner, engine.card, requests, way=way)
    assert found.keys() == plain.keys()
    for key, outcome in plain.items():
        assert_same(found[key], outcome, routing=outcome.routing is not None)
    if is_exact(engine):
        assert_identical(found, plain, routing=False)


def random_requests(seed: int, *, count: int, layout: RoutingLayout) -> list[GenerationRequest]:
    """Requests that share prompts, greedy and sampled, with penalties, biases, allowed ids, ends, several choices,
    scores, evidence of samples, hidden states, listed ids, forced routing, grammars, words to leave out, limits of
    reasoning, logit processors, sessions and hints about their cached pages."""
    generator, of_sessions = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    stems = [draw_prompt(generator, int(generator.integers(1, LONGEST_STEM))) for _ in range(NUM_STEMS)]
    requests = [_random_request(generator, stems, f"{seed}-{i}") for i in range(count)]
    requests = [_of_session(of_sessions, request) for request in requests]
    return [_forced(generator, request, layout) if generator.random() < 0.15 else request for request in requests]


def settle_placement(engine: Engine, eplb: EplbSteps, requests: list[GenerationRequest]) -> None:
    """Have experts go back to where the engine's own steps know them to be."""
    assert engine.loop.eplb is not None
    eplb.set_target(engine.loop.eplb.migration.placement)
    for _ in range(5):
        run_together(engine.runner, engine.card, requests, way=replace(PLAIN, eplb=eplb))
    assert eplb.migration.progress.is_done


def known_to_devices(request: GenerationRequest) -> GenerationRequest:
    """The request without all for which the host needs each token before the next."""
    sampling = replace(request.sampling, processor_arguments=())
    request = replace(request, sampling=sampling, constraint=None, bad_word_ids=(), thinking=None)
    asked = {"raw_logprobs": False, "return_entropy": False, "return_sampling_mask": False, "logprob_token_ids": ()}
    return replace(request, return_hidden_states="", listed_in_prompt=None, **asked)


def _forced(generator: np.random.Generator, request: GenerationRequest, layout: RoutingLayout) -> GenerationRequest:
    """The request with random experts for a part of its prompt."""
    start = int(generator.integers(len(request.prompt_ids)))
    stop = int(generator.integers(start, len(request.prompt_ids))) + 1
    shape = (stop - start, len(layout.layer_ids), layout.num_experts)
    rows = generator.random(shape).argsort(axis=-1)[..., : layout.top_k]
    return replace(request, forced_routing=RoutedExperts(rows.astype(np.int32), start=start))


def _of_session(generator: np.random.Generator, request: GenerationRequest) -> GenerationRequest:
    """Return the request, half of the time in a session and with random hints about its pages."""
    if generator.random() < 0.5:
        return request
    protected = ((int(generator.integers(1, len(request.prompt_ids) + 1)), float(generator.integers(1, 60))),)
    retention = Retention(protected if generator.random() < 0.5 else (), ends_session=bool(generator.random() < 0.3))
    return replace(request, session=f"session {generator.integers(3)}", retention=retention)


def _random_request(generator: np.random.Generator, stems: list[np.ndarray], name: str) -> GenerationRequest:
    tail = draw_prompt(generator, int(generator.integers(1, 30)))
    prompt_ids = np.concatenate([stems[generator.integers(len(stems))], tail])
    request = GenerationRequest(name, prompt_ids, _random_sampling(generator), bool(generator.random() < 0.7))
    if generator.random() < 0.2:
        request = replace(request, num_top_logprobs=int(generator.integers(1, 5)))
    if generator.random() < 0.2:
        request = replace(request, score_prompt_from=int(generator.integers(len(prompt_ids))))
    if generator.random() < 0.15:
        listed = tuple(int(word) for word in generator.integers(0, CORE_CONFIG.vocab_size, 4))
        request = replace(request, logprob_token_ids=listed, raw_logprobs=bool(generator.random() < 0.5))
    if generator.random() < 0.15:
        listed = generator.integers(-1, CORE_CONFIG.vocab_size, (int(generator.integers(len(prompt_ids))), 3))
        start = int(generator.integers(len(prompt_ids) - len(listed)))
        request = replace(request, listed_in_prompt=ListedInPrompt(start, listed.astype(np.int32)))
    if generator.random() < 0.3:
        request = _guided(generator, request)
    return replace(
        request,
        speculative=bool(generator.random() < 0.9),
        return_hidden_states=str(generator.choice(["", "", "", "", "all", "last"])),
        return_sampling_mask=bool(generator.random() < 0.1),
        return_entropy=bool(generator.random() < 0.1),
        raw_logprobs=request.raw_logprobs or bool(generator.random() < 0.1),
        priority=int(generator.integers(-1, 2)),
        cache_salt=str(generator.choice(["", "", "own"])),
    )


def _guided(generator: np.random.Generator, request: GenerationRequest) -> GenerationRequest:
    """The request with some of what the host holds samples for: a grammar, words to leave out, a limit of reasoning."""
    words = CORE_CONFIG.vocab_size
    kinds = generator.random(3) < 0.5
    if kinds[0]:
        constraint = CONSTRAINTS[generator.integers(len(CONSTRAINTS))]
        request = replace(request, constraint=constraint, sampling=replace(request.sampling, allowed_token_ids=()))
    if kinds[1]:
        single = tuple((int(word),) for word in generator.integers(3, words, 40))
        pairs = tuple((first, int(second)) for (first,) in single for second in generator.integers(3, words, 20))
        request = replace(request, bad_word_ids=single[:20] + pairs)
    if kinds[2]:
        markers = ReasoningMarkers((40,), (41, 42)[: int(generator.integers(1, 3))], bool(generator.random() < 0.7))
        request = replace(request, thinking=ThinkingLimit(int(generator.integers(0, 12)), markers))
    return request


def _random_sampling(generator: np.random.Generator) -> SamplingParams:
    def often(share: float) -> bool:
        return bool(generator.random() < share)

    words = CORE_CONFIG.vocab_size
    temperature = float(generator.choice([0.0, 0.0, 0.7, 1.0, 1.5]))
    some_ids = tuple(int(word) for word in generator.integers(0, words, 8))
    allowed = tuple(sorted({int(word) for word in generator.integers(0, words, 60)})) if often(0.15) else ()
    return SamplingParams(
        allowed_token_ids=allowed,
        n=int(generator.integers(1, 4)) if often(0.3) else 1,
        max_new_tokens=int(generator.integers(0, 30)),
        temperature=temperature,
        top_p=0.8 if often(0.2) else 1.0,
        top_k=int(generator.integers(2, 50)) if often(0.2) else 0,
        min_p=0.05 if often(0.1) else 0.0,
        seed=int(generator.integers(1 << 32)),
        presence_penalty=float(generator.uniform(-2, 2)) if often(0.2) else 0.0,
        frequency_penalty=float(generator.uniform(-2, 2)) if often(0.3) else 0.0,
        repetition_penalty=float(generator.uniform(0.7, 1.6)) if often(0.2) else 1.0,
        logit_bias=tuple((word, 2.5) for word in sorted(set(some_ids[:3]))) if often(0.3) else (),
        stop_token_ids=tuple(int(word) for word in generator.integers(0, words, 40)) if often(0.4) else (),
        min_new_tokens=int(generator.integers(0, 10)) if often(0.2) else 0,
        ignore_eos=often(0.7),
        processor_arguments=PROCESSED[generator.integers(len(PROCESSED))] if often(0.2) else (),
    )
