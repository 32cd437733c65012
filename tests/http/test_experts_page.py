"""The page about experts loads nothing from elsewhere, needs the key for its numbers, and gets what balancing tells."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from rayserve_moe.balancing.load_window import AGED
from rayserve_moe.balancing.migration import Migration, MigrationProgress
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.balancing.placement_file import placement_as_json, placement_in, read_placement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.planning import imbalance, rank_loads
from rayserve_moe.cli import main
from rayserve_moe.engine.eplb.control import BalancingView, MigrationRecord, RealisedBalance
from rayserve_moe.engine.eplb.health import ActorView, PlanProblem
from rayserve_moe.engine.eplb.steps import COUNTS_EVERY_UNPLANNED, EplbSteps
from rayserve_moe.rollouts.answers import Refused
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.plan_experts import place_from_rows
from rayserve_moe.rollouts.shards import RolloutDirectory
from rayserve_moe.serving.api.routes.pages import read_page
from tests.http.conftest import served
from tests.support.experts.eplb_proposals import CountedSteps
from tests.support.experts.placements import random_placement
from tests.support.serving.http_server import KEY
from tests.unit.rollouts.test_plan_experts import skewed

LAYERS, EXPERTS, RANKS, REDUNDANT = 3, 16, 4, 4


class ShownBalancing:
    """What the routes ask of balancing, with a placement that was planned for real."""

    def __init__(self, *, layers=LAYERS, experts=EXPERTS, ranks=RANKS, redundant=REDUNDANT):
        tokens = np.random.default_rng(0).lognormal(8, 1, (layers, experts)).round()
        placement = plan(tokens, ep_size=ranks, num_redundant=redundant)
        start = identity_placement(layers, experts, ep_size=ranks, num_redundant=redundant)
        without = identity_placement(layers, experts, ep_size=ranks)
        now, before, identity = (rank_loads(each, tokens) for each in (placement, start, without))
        promised = [float(imbalance(loads).mean()) for loads in (before, now)]
        self._view = BalancingView(
            enabled=True,
            num_layers=layers,
            num_experts=experts,
            num_slots=experts + redundant,
            ep_size=ranks,
            layer_ids=list(range(1, layers + 1)),
            tokens=tokens.tolist(),
            rank_load_identity=identity.tolist(),
            rank_load_now=now.tolist(),
            rank_load_before=before.tolist(),
            imbalance_before=imbalance(before).tolist(),
            imbalance_now=imbalance(now).tolist(),
            counts_every=16,
            plan=None,
            plans=[1],
            progress=MigrationProgress(1, layers, layers - 1, 30, 20),
            history=[MigrationRecord(1, 512, 1.7e9, 30, layers, *promised, 0.25, "under way")],
            actor=ActorView(True, 1, {"stale": 2}, 12.5, 0.4, 0.0, PlanProblem("stale", "experts are moving", 1.7e9)),
            realised=RealisedBalance(1.01, 1.02, [1.5] * layers, [3.0] * layers),
        )

    def view(self):
        return self._view

    def view_of_plan(self, version):
        return replace(self._view, plan=version) if version in self._view.plans else None


@pytest.fixture(scope="module")
def shown():
    return ShownBalancing()


def test_every_name_the_page_reads_is_in_the_numbers(shown):
    """A field that is renamed on one side only would leave a hole in the page."""
    numbers = shown.view().as_json()
    text = read_page("/experts").text
    there = {"view": {**numbers, "replica": "a", "replicas": ["a"]}, "entry": numbers["history"][0]}
    there |= {"progress": {**numbers["progress"], "value": 0, "max": 0}, "actor": numbers["actor"]}
    read = {name: set(re.findall(rf"\b{name}\.([a-z_]+)", text)) for name in there}
    for name, fields in read.items():
        assert fields and fields <= set(there[name]), name
    assert len(read["view"]) > 10 and read["progress"] & set(numbers["progress"])


def test_without_balancing_loads_are_shown_all_the_same(http, engine):
    """Every token of the last steps counts once per layer and pick; the last few come with the next reading."""
    body = {"prompt": [5, 6], "max_tokens": 3 * COUNTS_EVERY_UNPLANNED, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    after, computed = http.get("/experts/state").json(), engine.loop.statistics()["tokens_computed"]
    assert after.keys() == ShownBalancing().view().as_json().keys()
    assert after["enabled"] is False and after["history"] == after["plans"] == []
    assert after["counts_every"] == COUNTS_EVERY_UNPLANNED
    layout = engine.loop.card.routing
    counted = np.sum(after["tokens"], axis=1) / layout.top_k
    assert np.allclose(counted, counted[0]) and AGED * COUNTS_EVERY_UNPLANNED < counted[0] <= computed
    assert after["layer_ids"] == list(layout.layer_ids) and np.shape(after["tokens"])[1] == layout.num_experts
    assert np.allclose(np.sum(after["rank_load_now"], axis=1), np.sum(after["tokens"], axis=1))


def test_the_numbers_are_those_of_balancing(engine, shown, monkeypatch):
    monkeypatch.setattr(engine.loop, "eplb_control", shown)
    with served(engine) as url:
        answer = httpx.get(f"{url}/experts/state")
    assert answer.json() == shown.view().as_json()


def test_a_placement_is_told_and_moved_to(engine, monkeypatch):
    """On steps that move experts; the pieces travel in the steps of a model (tests/pipelines)."""
    start = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
    eplb = EplbSteps(Migration(start, hosts=1, slots_per_step=8))
    monkeypatch.setattr(engine.loop, "eplb", eplb)
    wanted = random_placement(start, seed=1)
    with served(engine) as url, BlockingRolloutClient(url) as client:
        np.testing.assert_array_equal(placement_in(client.expert_placement()).expert_of_slot, start.expert_of_slot)
        assert client.place_experts(placement_as_json(wanted))["version"] == 1
        with pytest.raises(Refused, match="still moving to placement 1") as conflict:
            client.place_experts(placement_as_json(random_placement(start, seed=2)))
        assert conflict.value.status == 409
        assert client.place_experts(placement_as_json(wanted))["version"] == 1, "a retry"
        CountedSteps(eplb, np.ones((LAYERS, EXPERTS))).run(60)
        told = client.expert_placement()
        np.testing.assert_array_equal(placement_in(told).expert_of_slot, wanted.expert_of_slot)
        assert told["weight_version"] == engine.loop.card.weight_version
        with pytest.raises(Refused, match="the placements have different"):
            client.place_experts(placement_as_json(identity_placement(LAYERS, EXPERTS, ep_size=RANKS)))
        with pytest.raises(Refused, match="has no slot"):
            client.place_experts(placement_as_json(wanted) | {"num_experts": EXPERTS + 1})
        with pytest.raises(Refused, match="expert_of_slot"):
            client.place_experts({"num_experts": EXPERTS, "ep_size": RANKS})


def test_of_placements_sent_at_once_one_is_taken(engine, monkeypatch):
    """The others get 409, and experts end at the accepted placement."""
    start = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
    eplb = EplbSteps(Migration(start, hosts=1, slots_per_step=8))
    monkeypatch.setattr(engine.loop, "eplb", eplb)
    wanted = [random_placement(start, seed) for seed in range(1, 9)]
    with served(engine) as url, ThreadPoolExecutor(len(wanted)) as threads:

        def send(placement: ExpertPlacement) -> httpx.Response:
            return httpx.post(f"{url}/experts/placement", json=placement_as_json(placement), timeout=60)

        answers = list(threads.map(send, wanted))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    CountedSteps(eplb, np.ones((LAYERS, EXPERTS))).run(60)
    taken = next(i for i, answer in enumerate(answers) if answer.status_code == 200)
    np.testing.assert_array_equal(eplb.migration.placement.expert_of_slot, wanted[taken].expert_of_slot)
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 409} == {"experts_moving"}


def test_a_rollout_moves_the_experts_of_its_server(engine, monkeypatch, tmp_path, capsys):
    """By the command, which writes and sends, and as the rollout job does it."""
    start = identity_placement(LAYERS, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([skewed(number) for number in range(0, 40, 2)])
    for does_it in ("command", "job"):
        eplb = EplbSteps(Migration(start, hosts=1, slots_per_step=8))
        monkeypatch.setattr(engine.loop, "eplb", eplb)
        with served(engine) as url:
            if does_it == "command":
                out = tmp_path / "planned.json"
                command = ["plan-experts", str(tmp_path), "--url", url, "--batch", "8", "--out", str(out), "--send"]
                assert main(command) == 0, capsys.readouterr().err
            else:
                assert place_from_rows(tmp_path, url=url, batch=8) == 1
        CountedSteps(eplb, np.ones((LAYERS, EXPERTS))).run(60)
        wanted = read_placement(out)
        np.testing.assert_array_equal(eplb.migration.placement.expert_of_slot, wanted.expert_of_slot)
        assert (wanted.expert_of_slot != start.expert_of_slot).any()


def test_rows_of_another_model_move_nothing(engine, monkeypatch, tmp_path):
    start = identity_placement(LAYERS + 1, EXPERTS, ep_size=RANKS, num_redundant=REDUNDANT)
    eplb = EplbSteps(Migration(start, hosts=1, slots_per_step=8))
    monkeypatch.setattr(engine.loop, "eplb", eplb)
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([skewed(0)])
    with served(engine) as url, pytest.raises(ValueError, match="4 layers of 16 experts, the rows 3 of 16"):
        place_from_rows(tmp_path, url=url, batch=8)
    assert eplb.state() is not None, "nothing is requested"


def test_experts_that_never_move_are_told_so(http, engine):
    placement = http.get("/experts/placement").json()
    assert placement["num_experts"] == engine.loop.card.routing.num_experts
    answer = http.post("/experts/placement", json=placement)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "experts_stay")


def test_loads_of_a_plan_are_those_that_are_kept(engine, shown, monkeypatch):
    monkeypatch.setattr(engine.loop, "eplb_control", shown)
    with served(engine) as url:
        kept, gone, wrong = (httpx.get(f"{url}/experts/state", params={"plan": plan}) for plan in ("1", "2", "-1"))
    assert kept.json() == {**shown.view().as_json(), "plan": 1}
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "plan_not_found")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "plan")


def test_the_page_asks_for_the_key_that_its_numbers_need(engine, shown, monkeypatch):
    monkeypatch.setattr(engine.loop, "eplb_control", shown)
    with served(engine, api_key=KEY) as url:
        page, refused = httpx.get(f"{url}/experts"), httpx.get(f"{url}/experts/state")
        told = httpx.get(f"{url}/experts/state", headers={"authorization": f"Bearer {KEY}"})
    assert page.status_code == 200 and KEY not in page.text
    assert refused.status_code == 401 and told.json()["enabled"]
