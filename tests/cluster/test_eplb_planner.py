"""Experts follow loads by themselves over Ray: whatever befalls the balancer, requests are answered as without it."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.balancing.planning import PlacementState, PlanFailure, imbalance
from rayserve_moe.checkpoints.synthetic import PRESETS, Drawn, write_checkpoint
from rayserve_moe.cluster.eplb_planner import BALANCER_NAME, EplbPlanner, EplbPlannerActor, RemotePlanner
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from tests.cluster.conftest import SETTINGS
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.experts.eplb_proposals import GARBAGE
from tests.support.experts.placements import random_placement
from tests.support.serving.http_client import wait_until

PORT = free_port()
WITHIN_S = 900.0
NUM_TOKENS = 60
PLACES = {**SETTINGS, "devices_per_host": 4, "num_redundant_experts": 4}
BALANCED = {**PLACES, "enable_eplb": True, "eplb_interval": 48, "eplb_window": 400}
RULES = {"interval": 48, "window": 400}
PROMPTS = [np.random.default_rng(seed).integers(3, 500, 10 + seed).tolist() for seed in range(4)]


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dataclasses.replace(PRESETS["tiny"], drawn=Drawn(router_skew=1.0))
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "skewed", config, dtype="float32")


@pytest.fixture(scope="module")
def expected(skewed: Path) -> list[list[int]]:
    """What is answered without balancing."""
    with Engine(str(skewed), **PLACES) as engine:
        answers = engine.generate(input_ids=PROMPTS, max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [answer["output_ids"] for answer in answers]


class Load:
    """Asks for the same answers over and over, from threads, and compares each with what it has to be."""

    def __init__(self, ask: Callable[[list[int]], list[int]], expected: list[list[int]]) -> None:
        self._ask, self._expected = ask, expected
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._runs: list[Future[None]] = []
        self.num_answers = 0

    def _run(self, number: int) -> None:
        while not self._is_over.is_set():
            assert self._ask(PROMPTS[number]) == self._expected[number]
            self.num_answers += 1

    def __enter__(self) -> Load:
        self._runs = [self._threads.submit(self._run, number) for number in range(len(PROMPTS))]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for run in self._runs:
            run.result(WITHIN_S)
        assert self.num_answers > 0

    def until(self, condition: Callable[[], object], *, asks_every_s: float = 0.05) -> None:
        """Go on until it holds."""
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            for run in self._runs:
                assert not run.done(), run.result()
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(asks_every_s)


def is_balanced(view: dict[str, Any]) -> bool:
    """Whether experts have moved, and ranks carry about the same now, as they would not in the order of experts."""
    is_moved = any(record["outcome"] == "finished" for record in view["history"])
    in_order = imbalance(np.asarray(view["rank_load_identity"]))
    return is_moved and bool(np.mean(view["imbalance_now"]) < 1.15 < 1.3 < in_order.mean())


# --- As deployed


@pytest.fixture
def app(raylets: int, skewed: Path) -> Iterator[httpx.Client]:
    with deployed(skewed, {**BALANCED, "eplb_interval": 200}, port=PORT, name="balanced") as client:
        yield client
        serve.delete("balanced")


@pytest.mark.slow
def test_a_killed_balancer_comes_back_and_experts_follow_the_load(app: httpx.Client, expected: list[list[int]]) -> None:
    def ask(prompt: list[int]) -> list[int]:
        sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = app.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        return answer.raise_for_status().json()["output_ids"]

    def view() -> dict[str, Any]:
        return app.get("/experts/state").json()

    wait_until(lambda: view()["actor"]["alive"], WITHIN_S)
    ray.kill(the_balancer())
    assert view()["history"] == [], "nothing can be planned before the first step"
    with Load(ask, expected) as load:
        load.until(lambda: not view()["actor"]["alive"] or view()["actor"]["restarts"])
        num_answers = load.num_answers
        load.until(lambda: load.num_answers > num_answers + 4)
        load.until(lambda: is_balanced(view()), asks_every_s=0.5)
    shown = view()
    assert shown["actor"]["restarts"] == 1 and shown["actor"]["refused"] == {}
    assert shown["ep_size"] == 4 and shown["num_slots"] == 20 and shown["layer_ids"] == [0, 1, 2, 3]
    metrics = re.sub(r'{model_name="[^"]*"}|model_name="[^"]*",|,model_name="[^"]*"', "", app.get("/metrics").text)
    for line in (
        "rayserve_moe_expert_balancer_restarts_total 1.0",
        "rayserve_moe_expert_balancer_up 1.0",
        f"rayserve_moe_expert_rebalances_begun_total {len(shown['history'])}.0",
        f"rayserve_moe_expert_slots_moved_total {sum(record['moved_slots'] for record in shown['history'])}.0",
    ):
        assert line in metrics, line

    def value_of(name: str) -> float:
        (value,) = re.findall(rf"^rayserve_moe_expert_{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
        return float(value)

    assert 0 < value_of("planning_seconds_total") < WITHIN_S
    for name in ('{layer="3",placement="now"}', '_max{placement="before"}', '_mean{placement="now"}'):
        assert 1 <= value_of(f"imbalance{name}") <= shown["ep_size"], (
            "of equal loads, and of one rank that has all of it"
        )


def the_balancer() -> ActorHandle:
    (name,) = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("SERVE_DEPLOYMENT_ACTOR") and actor["name"].endswith(BALANCER_NAME)
    ]
    return ray.get_actor(name, namespace="serve")


# --- A replica's engine, and balancers of all kinds


class Garbling(EplbPlanner):
    """Spoils its plans."""

    def __init__(self, name: str, **rules: Any) -> None:
        super().__init__(**rules)
        self._spoil, _ = GARBAGE[name]

    def propose(self, engine: str, state: PlacementState) -> Any:
        proposal = super().propose(engine, state)
        return None if proposal is None else self._spoil(proposal)


class Slow(EplbPlanner):
    """Takes its time over plans."""

    def propose(self, engine: str, state: PlacementState) -> Any:
        proposal = super().propose(engine, state)
        time.sleep(2.0)
        return proposal


class Failing(EplbPlanner):
    """Has no plans."""

    def propose(self, engine: str, state: PlacementState) -> Any:
        raise ArithmeticError("planted")


@dataclasses.dataclass
class Replica:
    """An engine over a worker actor, and the balancer that it finds now."""

    engine: ReplicaEngine
    found: SimpleNamespace
    start: ExpertPlacement

    @property
    def view(self) -> dict[str, Any]:
        return self.engine.loop.eplb_control.view().as_json()

    @property
    def placement(self) -> ExpertPlacement:
        return self.eplb.migration.placement

    @property
    def eplb(self) -> Any:
        return self.engine.loop.eplb

    @property
    def totals(self) -> Counter[str]:
        return self.engine.loop.eplb_control.history.totals

    def num_refused(self, reason: str) -> int:
        return self.view["actor"]["refused"].get(reason, 0)

    def ask(self, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(f"r{time.monotonic_ns()}-{len(prompt)}", np.asarray(prompt, np.int32), sampling)
        result = ChoiceResult()
        for delta in GenerationStream(self.engine.loop, self.engine.tokenizer, request=request):
            result.add(delta)
        assert result.finish is not None and result.finish.kind == "length", result.finish
        return result.token_ids

    def is_balanced_by(self, kind: type | None, *arguments: Any) -> None:
        """Have it find a balancer of this kind, or none, in the place of the one before, which dies."""
        before, self.found.actor = self.found.actor, None
        if before is not None:
            ray.kill(before)
        if kind is not None:
            self.found.actor = ray.remote(kind).options(num_cpus=0).remote(*arguments, **RULES)

    def go_back(self, load: Load) -> None:
        """Have all experts where they were at the start; nobody must be planning."""
        eplb = self.eplb
        eplb.set_target(self.start)
        load.until(lambda: eplb.migration.target is self.start and eplb.state() is not None)


@pytest.fixture(scope="module")
def replica(raylets: int, skewed: Path) -> Iterator[Replica]:
    found = SimpleNamespace(actor=None)

    def find() -> ActorHandle:
        if found.actor is None:
            raise ValueError("none there")
        return found.actor

    settings = settings_from({"model_path": str(skewed), **BALANCED})
    engine = start_replica_engine(settings, find_balancer=find)
    assert engine.loop.eplb is not None
    yield Replica(engine, found, engine.loop.eplb.migration.placement)
    engine.shutdown()


@pytest.fixture
def load(replica: Replica, expected: list[list[int]]) -> Iterator[Load]:
    """Requests without end, experts in their order, nobody who plans; in the end a good balancer has its way."""
    with Load(replica.ask, expected) as load:
        replica.is_balanced_by(None)
        replica.go_back(load)
        yield load
        replica.is_balanced_by(None)
        replica.go_back(load)
        num_finished = replica.totals["finished"]
        replica.is_balanced_by(EplbPlanner)
        load.until(lambda: is_balanced(replica.view) and replica.totals["finished"] > num_finished)


@pytest.mark.slow
def test_a_replica_answers_without_any_balancer(replica: Replica, load: Load) -> None:
    num_answers = load.num_answers
    load.until(lambda: load.num_answers > num_answers + 8)
    assert replica.placement is replica.start and not replica.view["actor"]["alive"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("other slots", marks=pytest.mark.slow),
        pytest.param("an expert twice on a rank", marks=pytest.mark.slow),
        pytest.param("a share that is no number", marks=pytest.mark.slow),
        pytest.param("an old version", marks=pytest.mark.slow),
    ],
)
def test_garbage_changes_nothing(replica: Replica, load: Load, name: str) -> None:
    _, reason = GARBAGE[name]
    num_refused = replica.num_refused(reason)
    replica.is_balanced_by(Garbling, name)
    load.until(lambda: replica.num_refused(reason) > num_refused)
    assert replica.placement is replica.start


@pytest.mark.slow
def test_a_plan_that_comes_too_late_changes_nothing(replica: Replica, load: Load) -> None:
    num_refused = replica.num_refused("stale")
    elsewhere = random_placement(replica.start, seed=1)
    replica.is_balanced_by(Slow)

    def was_refused() -> bool:
        """Meanwhile experts move; how long they do is not known to whoever plans."""
        replica.eplb.set_target(elsewhere)
        return replica.num_refused("stale") > num_refused

    load.until(was_refused, asks_every_s=1.0)


@pytest.mark.slow
def test_a_balancer_that_fails_changes_nothing(replica: Replica, load: Load) -> None:
    num_refused = replica.num_refused("failed")
    replica.is_balanced_by(Failing)
    load.until(lambda: replica.num_refused("failed") > num_refused)
    assert replica.placement is replica.start


@pytest.mark.slow  # in one process: tests/pipelines/test_migration.py
def test_experts_that_cannot_be_fetched_stay(replica: Replica, load: Load) -> None:
    """The host refuses a fetch once, as for want of memory; the layers before it have moved."""

    def refuse_third_fetch(worker: Any) -> None:
        runner = worker._runner
        programs = runner.programs.migration
        calls = iter(range(1000))

        def fetch(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")
            return programs.fetch(*arguments, **keywords)

        runner._programs = dataclasses.replace(runner.programs, migration=programs._replace(fetch=fetch))

    ray.get(replica.engine.executor.workers[0].__ray_call__.remote(refuse_third_fetch))
    replica.is_balanced_by(EplbPlanner)
    load.until(lambda: replica.view["history"] and replica.view["history"][-1]["outcome"] == "failed")
    assert replica.totals["failed"] == 1


# --- The actor alone


COUNTS = np.arange(2 * 16, dtype=np.int32).reshape(2, 16) * 1000
STATE = PlacementState(0, 0, identity_placement(2, 16, ep_size=4, num_redundant=4))


def test_every_engine_is_planned_for_from_its_own_loads(raylets: int) -> None:
    actor = EplbPlannerActor.options(num_cpus=0).remote(**RULES)
    one, other = RemotePlanner(lambda: actor), RemotePlanner(lambda: actor)
    for planner, counts in ((one, COUNTS), (other, COUNTS[:, ::-1])):
        planner.observe(LoadReading(0, 0, np.zeros_like(COUNTS)))
        assert planner.observe(LoadReading(0, 64, counts))
    first, second = one.propose(STATE), other.propose(STATE)
    assert first is not None and second is not None
    assert (first.expert_of_slot != second.expert_of_slot).any()
    ray.kill(actor)


def test_one_that_hangs_is_killed_and_found_again(raylets: int) -> None:
    actors = [ray.remote(Slow).options(num_cpus=0).remote(**RULES), EplbPlannerActor.remote(**RULES)]
    left = iter(actors)
    planner = RemotePlanner(lambda: next(left), answer_timeout_s=900.0)
    planner.observe(LoadReading(0, 0, np.zeros_like(COUNTS)))
    planner._answer_timeout_s = 0.2
    with pytest.raises(PlanFailure) as failure:
        planner.propose(STATE)
    assert failure.value.reason == "late"
    planner._answer_timeout_s = 900.0
    assert not planner.observe(LoadReading(0, 16, COUNTS)) and planner.propose(STATE) is None
    ray.kill(actors[1])
    with pytest.raises(RayActorError):
        ray.get(actors[1].__ray_call__.remote(lambda _: threading.Event().wait()), timeout=WITHIN_S)
    with pytest.raises(PlanFailure) as failure:
        planner.propose(STATE)
    assert failure.value.reason == "lost"


def test_of_many_engines_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    balancer = EplbPlanner(max_engines=2, **RULES)
    for engine in ("a", "b", "a", "c"):
        balancer.observe(engine, LoadReading(0, 0, COUNTS))
    assert list(balancer._advisors) == ["a", "c"]
    assert balancer.propose("b", STATE) is None
