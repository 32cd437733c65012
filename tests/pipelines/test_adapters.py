"""Adapters are merged and unloaded while requests run and experts move: log-probs and rows are of merged weights."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rayserve_moe import Engine
from tests.pipelines.conftest import EngineStore, ReferenceFactory
from tests.pipelines.test_weight_updates import MODES, loaded
from tests.support.checkpoints.adapters import LAYOUTS, make_adapter
from tests.support.checkpoints.weight_versions import VersionedReference
from tests.support.engine.run_requests import tolerance_of
from tests.support.engine.shared_settings import MOVING, ONE_BUCKET
from tests.support.engine.step_gate import wait_for_tokens

pytestmark = pytest.mark.slow
NUM_UPDATES = 10


def test_every_log_prob_and_row_is_of_the_merged_weights_that_the_answer_names(
    engine_with: EngineStore, core_checkpoint: Path, reference_for: ReferenceFactory, tmp_path: Path
) -> None:
    """In the dtype of the engine, to its tolerance; experts of near ties are counted."""
    engine = engine_with(**ONE_BUCKET, **MOVING)
    made = {layout: make_adapter(core_checkpoint, layout, seed=seed) for seed, layout in enumerate(LAYOUTS)}
    paths = {layout: each.write_merged(core_checkpoint, tmp_path / layout) for layout, each in made.items()}
    references = {path: reference_for(path) for path in (core_checkpoint, *paths.values())}
    reference = VersionedReference(references, engine.card.routing, tolerance=tolerance_of(engine.runner))
    version = f"start {time.monotonic_ns()}"
    assert engine.update_weights_from_disk(core_checkpoint, weight_version=version).success
    reference.note(version, core_checkpoint, is_recomputed=True)
    num_compilations = engine.runner.num_compilations_since_start
    with loaded(engine) as load:
        for update in range(NUM_UPDATES):
            mode, version = MODES[(update + update // 4) % 4], f"merged {update}"
            wait_for_tokens(engine.loop, 40)
            if mode is not None:
                engine.pause_generation(mode)
            path = _change(engine, made, paths, update=update, version=version, folder=tmp_path)
            reference.note(version, path or core_checkpoint, is_recomputed=mode in ("retract", "abort"))
            engine.continue_generation()
    assert not load.errors
    for prompt, answer in load.answers:
        reference.check(prompt, answer)
    reference.tally.check()
    assert reference.num_ranges > len(load.answers)
    assert engine.runner.num_compilations_since_start == num_compilations
    engine.unload_lora_adapter("a")


def _change(
    engine: Engine, made: dict, paths: dict[str, Path], *, update: int, version: str, folder: Path
) -> Path | None:
    """Load the next adapter, or unload every third; return the merged checkpoint, None for none."""
    if update % 3 == 2:
        outcome = engine.unload_lora_adapter("a", weight_version=version)
        assert outcome.success, outcome.message
        return None
    layout = LAYOUTS[update % len(LAYOUTS)]
    directory = made[layout].write(folder / f"adapter {update}")
    outcome = engine.load_lora_adapter(directory, lora_name="a", weight_version=version)
    assert outcome.success, outcome.message
    return paths[layout]
