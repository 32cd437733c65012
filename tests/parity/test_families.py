"""Every family, served in float32, against the Hugging Face implementation run here and now; needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from tests.support.models.families import FAMILY_CASES, FamilyCase

comparison = pytest.importorskip("tests.parity.family_comparison", reason="the live comparison needs torch")
live = pytest.importorskip("tests.parity.family_reference", reason="the live comparison needs torch: `make parity`")

pytestmark = pytest.mark.parity

CASES = [pytest.param(case, id=case.name, marks=() if case.variant == 0 else pytest.mark.slow) for case in FAMILY_CASES]
Record = Callable[[str, object], None]
MESH: dict[str, Any] = {"devices_per_host": 4, "data_parallel_size": 2}


class Served:
    """A case's checkpoint, what the reference says of it, and engines over it by their settings."""

    def __init__(self, case: FamilyCase, directory: Path, *, running: ExitStack) -> None:
        model = live.reference_model(case)
        self.path = model.save(directory)
        self.reference = comparison.reference_of(model, seed=case.variant, case=case.name)
        self._running, self._engines = running, {}
        self._captured = {"enable_return_indexer_topk": case.has_index}

    def engine(self, **settings: Any) -> Engine:
        """The engine with these settings, started once."""
        key = repr(settings)
        if key not in self._engines:
            engine = Engine(str(self.path), **comparison.ENGINE, **self._captured, **settings)
            self._engines[key] = self._running.enter_context(engine)
        return self._engines[key]


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as running:
        yield Served(request.param, tmp_path_factory.mktemp("family"), running=running)


def assert_same(served: Served, engine: Engine, record_property: Record) -> None:
    """Ids equal the reference; routing and index rows differ only at ties, and those are few."""
    answers = comparison.answers_of(engine, served.reference.prompts)
    comparison.assert_same_answers(answers, served.reference)
    num_differing, num_rows = comparison.differing_rows(answers, served.reference, engine.runner.config.spec)
    record_property("greedy ids", sum(len(answer["output_ids"]) for answer in answers))
    record_property("routing rows at ties", num_differing)
    record_property("routing rows", num_rows)
    assert num_differing <= 1e-3 * num_rows
    check_choices(comparison.index_rows_of(answers), served, record_property)


def check_choices(rows: list[np.ndarray | None], served: Served, record_property: Record) -> None:
    """Each index chooses the same tokens as the reference, except at a few ties."""
    num_differing, num_choices = comparison.differing_choices(rows, served.reference)
    record_property("choices of an index at ties", num_differing)
    record_property("choices of an index", num_choices)
    assert num_differing <= 1e-3 * num_choices


def test_logits_are_those_of_the_reference(served: Served, record_property: Record):
    outputs = comparison.outputs_of(served.engine(), served.reference)
    difference = comparison.logit_difference([each.logits_TV for each in outputs], served.reference.scored)
    record_property("logit difference", difference)
    record_property("logit difference of the reference in float32", served.reference.own_difference)
    assert difference <= served.reference.max_difference
    rows = [None if each.chosen_ITK is None else each.chosen_ITK.swapaxes(0, 1) for each in outputs]
    check_choices(rows, served, record_property)


def test_greedy_ids_and_routing_are_those_of_the_reference(served: Served, record_property: Record):
    assert_same(served, served.engine(), record_property)


@pytest.mark.slow
def test_four_devices_answer_as_the_reference(served: Served, record_property: Record):
    assert_same(served, served.engine(**MESH), record_property)
