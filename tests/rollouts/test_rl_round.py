"""`examples/rl_round.py`, as docs/rl/rows.md shows it, against a server of the calculator: it learns by the samples."""

from __future__ import annotations

import re

import pytest

from examples import rl_round
from examples.grpo.settings import GrpoSettings, server_settings
from rayserve_moe import Engine
from rayserve_moe.checkpoints.model_path import TRAINED
from tests.http.conftest import served


@pytest.mark.slow
def test_the_round_of_the_example_raises_the_reward(monkeypatch, capsys):
    settings = server_settings(GrpoSettings(dtype="float32"), model=TRAINED["calculator"])
    small = {"max_running_requests": 16, "precompile_bs_paddings": [16], "max_step_tokens": 128, "num_pages": 64}
    with Engine(**settings | small) as engine, served(engine) as url:
        monkeypatch.setattr("sys.argv", ["rl_round", "--url", url])
        rl_round.main()
    first, replay, second = capsys.readouterr().out.splitlines()
    before, after = (re.fullmatch(r"96 samples of weights (\S+): reward (\d\.\d\d)", line) for line in (first, second))
    assert before and after and (before[1], after[1]) == ("0", "round-1")
    assert float(after[2]) > float(before[2])
    assert float(re.search(r"replay is (\S+) nats", replay)[1]) < 1e-6, "float32 against float32"
