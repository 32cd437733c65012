"""Draft models of the calculator: what is trained is what is served, and it comes back from its files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.calculator.acceptance import accepted_lengths
from examples.calculator.batches import Batch
from examples.calculator.drafting import DraftRecipe, draft, read, target_scores, train, write
from examples.calculator.export import model_spec, read_weights, rounded
from examples.train_drafts import FORMS
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.run_requests import Way, run_together
from tests.support.engine.workload import request_for

HEADS = Path(__file__).parents[3] / "benchmarks" / "heads"
AHEAD = 3
PROBLEMS = (b"37+45=", b"120-7=", b"6*7=", b"#111+222=")
SETTINGS = {
    "dtype": "float32",
    "cpu_kernels": "off",
    "max_model_len": 64,
    "max_running_requests": 4,
    "max_step_tokens": 32,
    "num_pages": 40,
    "speculative_num_steps": AHEAD,
}


MOST_BYTES = 600_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", FORMS)
def test_writing_what_was_read_gives_the_files_of_the_repository(algorithm: str, tmp_path):
    target, directory = model_spec(), HEADS / f"calculator-{algorithm.lower()}"
    form = FORMS[algorithm](target)
    write(tmp_path, read(directory, form), form)
    kept, written = ({file.name: file.read_bytes() for file in each.iterdir()} for each in (directory, tmp_path))
    assert kept == written and sum(map(len, kept.values())) <= MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafts_of_the_target_s_noise_are_accepted_as_often_as_rejection_sampling_would(algorithm, temperature):
    target, spec = read_weights(TRAINED["calculator"])
    form = FORMS[algorithm](spec)
    found = accepted_lengths(
        read(HEADS / f"calculator-{algorithm.lower()}", form), target, form, temperature=temperature
    )
    assert found.shared_noise >= 0.9 * found.rejection and found.shared_noise > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", FORMS)
def test_what_is_trained_is_served(algorithm: str, tmp_path):
    target, spec = read_weights(TRAINED["calculator"])
    form = FORMS[algorithm](spec)
    head = rounded(train(target, form, DraftRecipe(steps=24, rows=8, width=32)))
    write(tmp_path / "head", head, form)
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "head", form), head)
    proposer, drafts_after = ModelProposer("drafts"), {}

    def note(cycle: StepCycle, _: int) -> Iterable[Sequence]:
        for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
            tokens = tuple(sequence.token_ids[: sequence.num_tokens].tolist())
            drafts_after[tokens] = proposer.propose(sequence, AHEAD).tolist()
        return ()

    requests = [request_for(np.frombuffer(problem, np.uint8), max_new_tokens=6) for problem in PROBLEMS]
    drafting = {"speculative_algorithm": algorithm, "speculative_draft_model_path": tmp_path / "head"}
    with Engine(model_path="trained:calculator", **drafting, **SETTINGS) as engine:
        way = Way(num_rows=4, step_tokens=32, num_pages=40, proposer=proposer, num_drafts=AHEAD, intervene=note)
        run_together(engine.runner, engine.card, requests, way=way)
    assert len(drafts_after) > len(PROBLEMS)
    rows = np.zeros((len(drafts_after), 24), np.int32)
    segments = np.full_like(rows, -1)
    for row, (tokens, drafts) in enumerate(drafts_after.items()):
        known = [*tokens, *drafts]
        rows[row, : len(known)], segments[row, : len(known)] = known, 0
    batch = Batch(rows, segments, segments >= 0)
    ahead = draft(head, target, target_scores(target, batch, spec), batch, form=form, ahead=AHEAD)
    words = np.array(form.words)[np.asarray(ahead.logits).argmax(-1)]
    for row, (tokens, drafts) in enumerate(drafts_after.items()):
        assert words[:, row, len(tokens) - 2].tolist() == drafts
