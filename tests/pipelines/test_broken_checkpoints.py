"""Whatever the files of an update hold: refused by one line, or the same weights, and the engine goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayserve_moe import Engine
from rayserve_moe.engine.control import WeightOrder
from tests.pipelines.test_weight_updates import CHANGING
from tests.support.checkpoints.broken_checkpoints import FILE, write_header
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.shared_settings import ONE_BUCKET

WITHIN_S = 60.0
NASTY = (
    *("1e400", "-1", "0", "1.5", "1" + "0" * 30, "9" * 5000, "NaN", "-Infinity", "null", "true", '"x"', "[]", "{}"),
    *("[[[[1]]]]", "[" * 2000 + "]" * 2000, '{"a":' * 1500 + "1" + "}" * 1500, '"\\ud800"', '"' + "y" * 70_000 + '"'),
    *("", ",", '"', "}", "\x00", "[" * 10**5),
)
"""What takes the place of a value, well-formed or not."""

FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4)
SPLICES = st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(NASTY))
CUTS = st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 0.2))
MUTATIONS = st.one_of(
    st.tuples(st.just("flip"), FLIPS), st.tuples(st.just("splice"), SPLICES), st.tuples(st.just("cut"), CUTS)
)


def mutated(text: bytes, kind: str, how: object) -> bytes:
    """Flip bits, put something else in the place of a value, or leave bytes out."""
    if kind == "flip":
        changed = bytearray(text)
        for place, bit in how:
            changed[int(place * len(text))] ^= 1 << bit
        return bytes(changed)
    place, what = how
    begin = int(place * len(text))
    if kind == "cut":
        return text[:begin] + text[begin + 1 + int(what * len(text)) :]
    ends = [i for i in range(begin, len(text)) if text[i : i + 1] in (b",", b"}", b"]")] or [begin]
    starts = [i for i in range(ends[0]) if text[i : i + 1] in (b":", b"[", b",")] or [0]
    return text[: starts[-1] + 1] + what.encode() + text[ends[0] :]


@pytest.fixture
def changing(engine_with: EngineStore, core_checkpoint: Path) -> Engine:
    """The engine of the weight updates, under the weights that are about to be broken."""
    engine = engine_with(**ONE_BUCKET, **CHANGING)
    assert engine.update_weights_from_disk(core_checkpoint, weight_version="good").success
    return engine


def answer_of(engine: Engine) -> list[int]:
    answer = engine.generate(input_ids=[3, 1, 4, 1, 5], max_new_tokens=3, temperature=0, ignore_eos=True)
    assert isinstance(answer, dict)
    return answer["output_ids"]


@pytest.mark.parametrize("num_examples", [12, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_mutated_checkpoint_is_refused_or_is_the_same(
    changing: Engine, core_checkpoint: Path, tmp_path: Path, num_examples: int
) -> None:
    """Its config or its header; what is taken all the same was mutated where it means nothing."""
    path = shutil.copytree(core_checkpoint, tmp_path / "marker")
    raw, config = (path / FILE).read_bytes(), (path / "config.json").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header, tensors = json.dumps(json.loads(raw[8:end])).encode(), raw[end:]
    wanted, num_refused = answer_of(changing), 0

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(is_config=st.booleans(), mutation=MUTATIONS)
    def check(is_config: bool, mutation: tuple[str, object]) -> None:
        nonlocal num_refused
        (path / "config.json").write_bytes(mutated(config, *mutation) if is_config else config)
        write_header(path / FILE, header if is_config else mutated(header, *mutation), tensors)
        outcome = changing.loop.control.update_weights(WeightOrder(str(path), "good")).result(WITHIN_S)
        if not outcome.success:
            num_refused += 1
            assert outcome.message and outcome.message.isprintable() and len(outcome.message) < 400
            assert "marker" not in outcome.message
        assert answer_of(changing) == wanted

    check()
    assert num_refused > num_examples / 3
