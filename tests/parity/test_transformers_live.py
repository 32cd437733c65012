"""The engine, and the committed goldens, against the Hugging Face implementation run here and now; needs torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity import comparison
from tests.parity.cases import Golden, load_golden

live = pytest.importorskip("tests.parity.reference", reason="the live comparison needs torch: `make parity`")

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def reference(case, checkpoint) -> Golden:
    return live.run_reference(case, checkpoint)


@pytest.fixture(scope="module")
def answers(engine, case) -> list[dict[str, Any]]:
    return comparison.generate_answers(engine, case)


def test_the_committed_golden_is_what_the_reference_computes(reference, case):
    golden = load_golden(case)
    assert golden.weights_sha256.item() == reference.weights_sha256.item()
    assert golden.prompts.tolist() == reference.prompts.tolist()
    assert golden.greedy_ids.tolist() == reference.greedy_ids.tolist()
    assert golden.layer_ids.tolist() == reference.layer_ids.tolist()
    np.testing.assert_allclose(golden.logits, reference.logits, rtol=0, atol=comparison.MAX_LOGIT_DIFFERENCE)
    differs = (golden.routed_experts != reference.routed_experts).any(-1)
    assert not (differs & (golden.gaps >= comparison.TIE_GAP)).any()


def test_greedy_ids_are_those_of_the_reference(reference, answers):
    comparison.assert_same_ids(reference, answers)


def test_logprobs_are_those_of_the_reference(reference, answers):
    comparison.assert_same_logprobs(reference, answers)


def test_routing_rows_are_those_of_the_reference_in_order(reference, answers, case):
    comparison.assert_same_routing(reference, answers, case.config.num_hidden_layers)
