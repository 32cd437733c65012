"""A recording of answers repeats itself, and a changed answer is found."""

from __future__ import annotations

import asyncio
import json

from benchmarks.recorded_bodies import compare, record


def test_the_answers_of_one_tree_are_equal_and_a_changed_one_is_shown(engine, tmp_path, capsys):
    before, after = tmp_path / "before", tmp_path / "after"
    told = asyncio.run(record(engine, "plain", seed=1, num_drawn=20, like=None))
    before.write_text(json.dumps(told))
    after.write_text(json.dumps(asyncio.run(record(engine, "plain", seed=2, num_drawn=0, like=told))))
    assert compare(before, after) == 0 and len(told) > 80
    assert {row["told"][:3] for row in told} >= {"200", "400", "404", "501"}
    changed = json.loads(after.read_text())
    changed[-1]["told"] += " "
    after.write_text(json.dumps(changed))
    capsys.readouterr()
    assert compare(before, after) == 1 and "1 differ" in capsys.readouterr().out
