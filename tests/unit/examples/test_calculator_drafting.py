"""A head for the calculator: what is trained is what is served, and it comes back from its files."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
import pytest

from examples.calculator.batches import Batch
from examples.calculator.drafting import WORDS, HeadRecipe, draft, head_spec, read_head, target_scores, train_head
from examples.calculator.drafting import write_head as write
from examples.calculator.export import read_weights, rounded
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.engine.model_drafts import ModelProposer
from rayserve_moe.engine.step_cycle import StepCycle
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.drive import Way, run_together
from tests.support.workload import request_for

AHEAD = 3
PROBLEMS = (b"37+45=", b"120-7=", b"6*7=", b"#111+222=")
SETTINGS = {
    "dtype": "float32",
    "cpu_kernels": "off",
    "max_model_len": 64,
    "max_running_requests": 4,
    "max_step_tokens": 32,
    "num_pages": 40,
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": AHEAD,
}


@pytest.mark.slow
def test_the_trained_head_is_the_served_one(tmp_path):
    target, spec = read_weights(TRAINED["calculator"])
    head = rounded(train_head(target, spec, HeadRecipe(steps=24, rows=8, width=32)))
    write(tmp_path / "head", head, spec)
    jax.tree.map(np.testing.assert_array_equal, read_head(tmp_path / "head", spec), head)
    proposer, drafts_after = ModelProposer("drafts"), {}

    def note(cycle: StepCycle, _: int) -> Iterable[Sequence]:
        for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
            tokens = tuple(sequence.token_ids[: sequence.num_tokens].tolist())
            drafts_after[tokens] = proposer.propose(sequence, AHEAD).tolist()
        return ()

    requests = [request_for(np.frombuffer(problem, np.uint8), max_new_tokens=6) for problem in PROBLEMS]
    with Engine(model_path="trained:calculator", speculative_draft_model_path=tmp_path / "head", **SETTINGS) as engine:
        way = Way(num_rows=4, step_tokens=32, num_pages=40, proposer=proposer, num_drafts=AHEAD, intervene=note)
        run_together(engine.runner, engine.card, requests, way=way)
    assert len(drafts_after) > len(PROBLEMS)
    rows = np.zeros((len(drafts_after), 24), np.int32)
    segments = np.full_like(rows, -1)
    for row, (tokens, drafts) in enumerate(drafts_after.items()):
        known = [*tokens, *drafts]
        rows[row, : len(known)], segments[row, : len(known)] = known, 0
    batch = Batch(rows, segments, segments >= 0)
    ahead = draft(head, target, target_scores(target, batch, spec), batch, spec=head_spec(spec), ahead=AHEAD)
    words = np.array(WORDS)[np.asarray(ahead.logits).argmax(-1)]
    for row, (tokens, drafts) in enumerate(drafts_after.items()):
        assert words[:, row, len(tokens) - 2].tolist() == drafts
