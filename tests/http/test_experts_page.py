"""The page about experts loads nothing from elsewhere, needs the key for its numbers, and gets what balancing tells."""

from __future__ import annotations

import re

import httpx
import numpy as np
import pytest

from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.view import ActorView, BalancingView, ProgressView, RebalanceRecord
from rayserve_moe.serving.experts_routes import PAGE
from tests.http.conftest import served

LAYERS, EXPERTS, RANKS, REDUNDANT = 3, 16, 4, 4


class ShownBalancing:
    """What the routes ask of balancing, with a placement that was planned for real."""

    def __init__(self, *, layers=LAYERS, experts=EXPERTS, ranks=RANKS, redundant=REDUNDANT):
        tokens = np.random.default_rng(0).lognormal(8, 1, (layers, experts)).round()
        placement = plan(tokens, ep_size=ranks, num_redundant=redundant)
        now = self.rank_loads(tokens, placement)
        before = self.rank_loads(tokens, identity_placement(layers, experts, ep_size=ranks, num_redundant=redundant))
        identity = tokens.reshape(layers, ranks, -1).sum(2)
        worst = [float((loads.max(1) / loads.mean(1)).max()) for loads in (before, now)]
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
            imbalance_before=(before.max(1) / before.mean(1)).tolist(),
            imbalance_now=(now.max(1) / now.mean(1)).tolist(),
            progress=ProgressView(1, layers, layers - 1, 30, 20, False),
            history=[RebalanceRecord(1, 512, 1.7e9, 30, layers, *worst, 0.25, "under way")],
            actor=ActorView(True, 1, {"stale": 2}),
        )

    @staticmethod
    def rank_loads(tokens, placement):
        per_slot = np.take_along_axis(tokens, placement.expert_of_slot, 1) * placement.share_of_slot
        return per_slot.reshape(len(tokens), placement.ep_size, -1).sum(2)

    def view(self):
        return self._view


@pytest.fixture(scope="module")
def shown():
    return ShownBalancing()


def test_the_page_holds_everything_it_needs(http):
    answer = http.get("/experts")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert re.findall(r"(?:https?:)?//[a-z]", answer.text) == []
    assert re.findall(r"<script[^>]+src|<link[^>]+stylesheet|@import|url\(", answer.text) == []


def test_every_name_the_page_reads_is_in_the_numbers(shown):
    """A field that is renamed on one side only would leave a hole in the page."""
    numbers = shown.view().as_json()
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"\bview\.([a-z_]+)", text)) <= set(numbers)
    assert set(re.findall(r"\bentry\.([a-z_]+)", text)) <= set(numbers["history"][0])
    assert set(re.findall(r"\bprogress\.([a-z_]+)", text)) <= set(numbers["progress"]) | {"value", "max"}
    assert set(re.findall(r"\bactor\.([a-z_]+)", text)) <= set(numbers["actor"])
    assert len(re.findall(r"\bview\.[a-z_]+", text)) > 10


def test_without_balancing_the_numbers_say_so(http):
    assert http.get("/experts/state").json() == {"enabled": False}


def test_the_numbers_are_those_of_balancing(engine, shown):
    with served(engine, balancing=shown) as url:
        answer = httpx.get(f"{url}/experts/state")
    assert answer.json() == shown.view().as_json()


def test_the_page_asks_for_the_key_that_its_numbers_need(engine, shown):
    with served(engine, balancing=shown, api_key="s3cret-key") as url:
        page, refused = httpx.get(f"{url}/experts"), httpx.get(f"{url}/experts/state")
        told = httpx.get(f"{url}/experts/state", headers={"authorization": "Bearer s3cret-key"})
    assert page.status_code == 200 and "s3cret-key" not in page.text
    assert refused.status_code == 401 and told.json()["enabled"]
