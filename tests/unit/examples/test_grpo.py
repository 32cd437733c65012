"""The GRPO example: its formulas by numpy, its experts by a dense sum, its weights as they travel, its checkpoints."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.calculator.problems import problem_of
from examples.grpo import checkpoints
from examples.grpo.ablation_tables import mean_rows, tables
from examples.grpo.arms import ARMS, shifted
from examples.grpo.batch import Batch, newest_only, replayed_as
from examples.grpo.chain import Chain, draw_chain
from examples.grpo.evaluation import NUM_HELD_OUT
from examples.grpo.kl_law import Distance, Probe, distance, law_table, read_probe, written
from examples.grpo.model import WEIGHTS_FILE, checkpoint_tensors, read_architecture, read_params, rounded
from examples.grpo.objective import Objective, distance_to, group_advantages, grpo_loss
from examples.grpo.policy import BLOCK, gate_weights, mix_experts
from examples.grpo.probe import ProbeAnswers
from examples.grpo.settings import FILE, GrpoSettings, agree, make_room_for_several
from examples.grpo.tasks import GRPO_TASKS, answer_rows, as_chain, problems_of_step
from examples.grpo.trainer import TrainerState
from rayserve_moe.checkpoints.model_path import TRAINED

CALCULATOR = TRAINED["calculator"]
SAMPLES, POSITIONS = 6, 5


@pytest.fixture
def generator():
    return np.random.default_rng(3)


def loss_by_token(new, old, sampled, *, advantages, mask, objective):
    """The objective of the papers, token by token: its negative mean, and the shares clipped and truncated."""
    terms, clipped, truncated = [], 0, 0
    for i, t in zip(*np.nonzero(mask), strict=True):
        ratio, advantage = np.exp(new[i, t] - old[i, t]), advantages[i]
        bounded = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
        weight = np.exp(old[i, t] - sampled[i, t])
        terms.append(min(weight, objective.tis_cap) * min(ratio * advantage, bounded * advantage))
        clipped += bounded * advantage < ratio * advantage
        truncated += weight > objective.tis_cap
    return -np.mean(terms), clipped / len(terms), truncated / len(terms)


@pytest.mark.parametrize("objective", [Objective(), Objective(clip_low=0.1, clip_high=0.28, tis_cap=1.1)])
def test_the_loss_is_that_of_the_papers(generator, objective):
    new, old, sampled = generator.normal(-1, 0.5, (3, SAMPLES, POSITIONS)).astype(np.float32)
    mask = generator.random((SAMPLES, POSITIONS)) < 0.6
    advantages = generator.normal(size=SAMPLES).astype(np.float32)
    loss, shares = grpo_loss(
        new, old, sampled_BS=sampled, advantages_B=advantages, mask_BS=mask, objective=objective
    )  # fmt: skip
    wanted = loss_by_token(new, old, sampled, advantages=advantages, mask=mask, objective=objective)
    # Terms are of order one and cancel: float32 leaves an error of their size, not of the sum's.
    assert [float(loss), float(shares["clip"]), float(shares["tis"])] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert 0 < shares["clip"] < 1 and 0 < shares["tis"] < 1


def test_on_policy_the_gradient_is_that_of_the_log_probs(generator):
    old = generator.normal(-1, 0.5, (SAMPLES, POSITIONS)).astype(np.float32)
    mask, advantages = np.ones((SAMPLES, POSITIONS), bool), np.arange(-2.0, 4.0, dtype=np.float32)

    def loss_of(new):
        return grpo_loss(
            new, old, sampled_BS=old, advantages_B=advantages, mask_BS=mask, objective=Objective()
        )[0]  # fmt: skip

    gradient = jax.grad(loss_of)(jnp.asarray(old))
    np.testing.assert_allclose(gradient, np.tile(-advantages[:, None] / mask.size, POSITIONS), rtol=1e-6)


def test_the_distance_to_a_reference_is_never_negative_and_its_gradient_leads_back(generator):
    new, reference = generator.normal(-1, 0.5, (2, SAMPLES, POSITIONS)).astype(np.float32)
    mask = generator.random((SAMPLES, POSITIONS)) < 0.6
    behind = (reference - new)[mask].astype(np.float64)
    assert float(distance_to(reference, new, mask)) == pytest.approx(np.mean(np.exp(behind) - 1 - behind), rel=1e-5)
    gradient = np.asarray(jax.grad(lambda new: distance_to(reference, new, mask))(jnp.asarray(new)))
    assert (np.sign(gradient)[mask] == np.sign(new - reference)[mask]).all() and not gradient[~mask].any()
    assert float(distance_to(new, new, mask)) == 0


def test_advantages_are_of_unit_spread_in_live_groups_and_zero_in_dead_ones():
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    advantages = group_advantages(rewards)
    np.testing.assert_allclose(advantages.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(advantages.std(axis=1), [1, 0, 0, 1])
    assert (advantages[rewards == 1] >= 0).all() and advantages[3].tolist() == [1, 1, -1, -1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spread", ["even", "one expert", "at the edge of a block"])
def test_experts_in_blocks_are_the_dense_sum_and_so_are_their_gradients(generator, spread):
    tokens, width, inner, experts, top_k = BLOCK + 7, 8, 6, 5, 2
    shapes = {"gate_LEFD": (experts, inner, width), "up_LEFD": (experts, inner, width)}
    shapes |= {"down_LEDF": (experts, width, inner), "router_LED": (experts, width)}
    layer = {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    hidden = jnp.asarray(generator.normal(size=(tokens, width)), jnp.float32)
    ids = np.argsort(generator.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    if spread != "even":
        ids[: BLOCK if spread.startswith("at") else tokens] = [3, 1]

    def dense(hidden, layer):
        inner_NEF = jax.nn.silu(jnp.einsum("ND,EFD->NEF", hidden, layer["gate_LEFD"]))
        inner_NEF *= jnp.einsum("ND,EFD->NEF", hidden, layer["up_LEFD"])
        out_NED = jnp.einsum("NEF,EDF->NED", inner_NEF, layer["down_LEDF"])
        scores = hidden @ layer["router_LED"].T
        picked = jnp.take_along_axis(out_NED, jnp.asarray(ids)[..., None], axis=1)
        return jnp.einsum("NKD,NK->ND", picked, gate_weights(scores, jnp.asarray(ids)))

    def blocks(hidden, layer):
        shares = gate_weights(hidden @ layer["router_LED"].T, jnp.asarray(ids))
        return mix_experts(hidden, jnp.asarray(ids), shares, layer=layer)

    ours, theirs = (jax.jit(run)(hidden, layer) for run in (blocks, dense))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    gradients = [
        jax.jit(jax.grad(lambda h, w, run=run: jnp.sum(jnp.sin(run(h, w))), argnums=(0, 1)))(hidden, layer)
        for run in (blocks, dense)
    ]
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3), *gradients)
    assert np.abs(gradients[0][1]["router_LED"]).max() > 0, "replayed ids leave the router its gradient"


def test_weights_travel_by_the_checkpoints_names_rounded_to_nearest_even(generator):
    architecture = read_architecture(CALCULATOR)
    params = read_params(CALCULATOR, architecture)
    stored = load_file(CALCULATOR / WEIGHTS_FILE)
    assert checkpoint_tensors(params, architecture).keys() == stored.keys()
    moved = {name: values * (1 + 0.001 * generator.normal(size=values.shape)) for name, values in params.items()}
    sent = checkpoint_tensors(moved, architecture)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in sent.items()} == {
        name: (tensor.shape, ml_dtypes.bfloat16) for name, tensor in stored.items()
    }
    kept = checkpoint_tensors(rounded(moved), architecture)
    assert all((sent[name].view(np.uint16) == kept[name].view(np.uint16)).all() for name in sent)
    down = sent["model.layers.2.mlp.experts.7.down_proj.weight"]
    assert (down == np.asarray(moved["down_LEDF"])[2, 7].astype(ml_dtypes.bfloat16)).all()


def test_gradients_pass_the_rounding():
    gradient = jax.grad(lambda values: jnp.sum(3 * rounded({"a": values})["a"]))(jnp.array([1.0001, -2.7]))
    assert gradient.tolist() == [3, 3]


def a_state(number):
    return TrainerState({"a": jnp.full((2, 3), float(number))}, (jnp.asarray(number), {"b": jnp.zeros(2)}))


def test_the_last_whole_checkpoint_is_found_and_older_ones_go(tmp_path):
    assert checkpoints.load(a_state(0), tmp_path / "none") is None
    for step in range(1, 5):
        checkpoints.save(a_state(step), {"rows": [step]}, step=step, directory=tmp_path)
    (tmp_path / "unfinished-17").mkdir()
    (tmp_path / "unfinished-17" / checkpoints.ARRAYS).write_bytes(b"cut off")
    state, facts = checkpoints.load(a_state(0), tmp_path)
    checkpoints.save(a_state(4), {"rows": [4]}, step=4, directory=tmp_path)
    assert not list(tmp_path.glob("unfinished-*")), "what kills have left does not add up"
    assert facts == {"step": 4, "rows": [4]} and len(checkpoints.checkpoints_in(tmp_path)) == checkpoints.KEPT
    jax.tree.map(np.testing.assert_array_equal, state, a_state(4))


def test_a_directory_is_of_one_run(tmp_path):
    agree(GrpoSettings(), tmp_path)
    agree(GrpoSettings(steps=3), tmp_path)
    with pytest.raises(ValueError, match="another seed"):
        agree(GrpoSettings(seed=1), tmp_path)
    with pytest.raises(ValueError, match="a single run"):
        make_room_for_several(tmp_path)
    make_room_for_several(tmp_path.parent / "several")
    agree(GrpoSettings(seed=1), tmp_path.parent / "several" / "replay-1")
    with pytest.raises(ValueError, match="several runs"):
        agree(GrpoSettings(), tmp_path.parent / "several")
    (tmp_path / FILE).write_text('{"steps": 6', encoding="utf-8")
    with pytest.raises(ValueError, match="does not hold the settings"):
        agree(GrpoSettings(), tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"prompts": 0}, {"group": 1}, {"seed": -1}, {"learning_rate": float("nan")}, {"max_kl": -1.0}],
    ids=str,
)
def test_settings_that_no_run_can_have_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .* or more"):
        GrpoSettings(**wrong)
    with pytest.raises(ValueError, match="asynchronous"):
        GrpoSettings(partial=True)


def test_a_file_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "file"
    file.write_text("before", encoding="utf-8")

    def write(text, *, is_killed=False):
        with checkpoints.whole_file(file) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
            if is_killed:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("aft", is_killed=True)
    assert file.read_text(encoding="utf-8") == "before"
    write("after")
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and file.read_text(encoding="utf-8") == "after"


@pytest.mark.parametrize("task", GRPO_TASKS)
def test_problems_are_of_the_step_and_never_held_out(task):
    drawn = [problem for step in range(40) for problem in problems_of_step(step, 32, seed=0, task=task)]
    assert drawn[:32] == problems_of_step(0, 32, seed=0, task=task) != drawn[32:64]
    kept = GRPO_TASKS[task].held_out(NUM_HELD_OUT)
    assert len(kept) >= 300 and not set(kept) & set(drawn)
    links = [link for problem in drawn for link in links_of(problem)]
    assert not any(problem_of("#", link).is_held_out for link in links)
    assert all(any(problem_of("#", link).is_held_out for link in links_of(problem)) for problem in kept)


def links_of(problem):
    """The operands of each turn's problem where all answers are right."""
    firsts = [int(problem.prompt.split("#")[0]), *map(int, problem.answers)]
    seconds = [int(problem.prompt.split("#")[1].removesuffix("=")), *problem.operands]
    return list(zip(firsts, seconds, strict=False))


def test_sums_and_their_ends_are_rewarded():
    problem = as_chain(problem_of("#", (7, 12)))
    rewards = {text: problem.reward(0, text.encode()) for text in ("19\n", "-5\n", "19", "19\n\n", "1")}
    assert rewards == {"19\n": 1, "-5\n": 0, "19": 0, "19\n\n": 0, "1": 0}
    assert not problem.goes_on(0, b"19\n")


def test_a_chain_goes_on_from_what_was_answered_and_rewards_the_last_sum_alone():
    problem = Chain("3#4=", (5, 6), ("7", "12", "18"))
    assert [problem.question(turn, answer_before="-9") for turn in range(3)] == ["3#4=", "-9#5=", "-9#6="]
    going_on = {
        text: problem.goes_on(0, text) for text in (b"7\n", b"-1\n", b"100\n", b"7", b"\n", b"\n\n", b"7a\n", b"99\n")
    }
    assert [text for text, goes_on in going_on.items() if goes_on] == [b"7\n", b"99\n"]
    assert not problem.goes_on(2, b"18\n")
    assert [problem.reward(turn, b"18\n") for turn in range(3)] == [0, 0, 1] and problem.reward(2, b"17\n") == 0


def test_rows_of_answers_are_those_of_a_conversation():
    problems = [Chain("3#4=", (5, 6), ("7", "12", "18")), as_chain(problem_of("#", (1, 2)))]
    ids, is_answer = answer_rows(problems, width=34)
    assert bytes(ids[0].astype(np.uint8)).startswith(b"3#4=7\n7#5=12\n12#6=18\n")
    assert [bytes(row[mask].astype(np.uint8)) for row, mask in zip(ids, is_answer, strict=True)] == [
        b"7\n12\n18\n",
        b"3\n",
    ]
    longest = [draw_chain(random.Random(seed), held_out=False) for seed in range(200)]
    assert answer_rows(longest, width=34)[1].any(axis=1).all()


def test_each_arm_changes_the_rows_that_it_says(generator):
    shape, lengths = (4, 6), [5, 3, 4, 5]
    columns = np.arange(shape[1])
    replay, prompt = columns < np.array(lengths)[:, None], columns < np.array([2, 2, 3, 1])[:, None]
    rows = np.where(replay[..., None, None], generator.integers(1, 16, (*shape, 3, 2)), 0)
    floats = np.zeros((shape[0], shape[1] - 1), np.float32)
    batch = Batch(
        np.zeros(shape, np.int32), rows, replay, prompt, floats, floats > 0, floats.astype(object), rows[..., 0, 0]
    )
    made = {name: arm(batch, generator, lambda: np.full_like(rows, 9)) for name, arm in ARMS.items()}
    assert (made["replay"].rows_BTLK == rows).all() and not made["free"].replay_BT.any()
    assert (made["stale"].rows_BTLK[replay] == 9).all() and (made["stale"].rows_BTLK[~replay] == 0).all()
    assert (made["shifted"].rows_BTLK[~prompt] == rows[~prompt]).all()
    assert (made["shifted"].rows_BTLK[2, 1:3] == rows[2, :2]).all() and (
        made["shifted"].rows_BTLK[0, 0] == rows[0, 0]
    ).all()
    for sample, length in enumerate(lengths):
        ours, theirs = (np.sort(r[sample, :length], axis=0) for r in (made["permuted"].rows_BTLK, rows))
        assert (np.sort(ours.reshape(length, -1), axis=None) == np.sort(theirs.reshape(length, -1), axis=None)).all()
    assert (made["permuted"].rows_BTLK != rows).any() and (shifted(batch, -1)[:, :-1] == rows[:, 1:]).all()


def test_a_sample_that_spans_an_update_is_trained_on_where_it_is_of_the_newest_weights():
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    versions = np.array([["", "7", "7", "8"], ["7", "7", "", ""], ["8"] * 4], object)
    rows = np.array([["8", "8", "7", "8", ""], ["7", "7", "", "", ""], ["8", "8", "8", "8", ""]], object)
    shape = (*rows.shape, 1, 1)
    batch = Batch(
        np.zeros(rows.shape, np.int32),
        np.zeros(shape, np.int32),
        rows != "",
        rows != "",
        np.zeros(mask.shape, np.float32),
        mask,
        versions,
        rows,
    )
    trained = newest_only(batch, ["7", "8"])
    assert (trained.mask_BS == [[0, 0, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).all()
    assert (trained.replay_BT == [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).all()
    assert (replayed_as(batch, "7").replay_BT == (rows == "7")).all() and batch.versions == {"7", "8"}


def of_probe(generator, *, apart):
    """A probe of a vocabulary of 40, and a trainer's log-probs of it."""
    shape = SAMPLES, POSITIONS
    logits = generator.normal(size=(*shape, 40))
    theirs = np.asarray(jax.nn.log_softmax(logits))
    ours = np.asarray(jax.nn.log_softmax(logits + apart * generator.normal(size=logits.shape)))
    ids = np.concatenate([np.zeros((SAMPLES, 1), int), generator.integers(40, size=shape)], axis=1).astype(np.int32)
    mask = generator.random(shape) < 0.6
    sampled = np.take_along_axis(theirs, ids[:, 1:, None], axis=-1)[..., 0]
    nothing = np.zeros((SAMPLES, POSITIONS + 1, 1, 1), np.int32)
    batch = Batch(
        ids,
        nothing,
        nothing[..., 0, 0] > 0,
        nothing[..., 0, 0] > 0,
        sampled,
        mask,
        mask.astype(object),
        nothing[..., 0, 0],
    )
    return ProbeAnswers([], [theirs[i, mask[i]] for i in range(SAMPLES)]), batch, ours, theirs


def test_distances_of_a_probe_are_the_kl_of_whole_distributions(generator):
    answers, batch, ours, theirs = of_probe(generator, apart=0.3)
    found = distance(answers, batch, ours)
    whole = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)[batch.mask_BS].mean()
    assert found.exact == pytest.approx(whole, rel=1e-3)
    apart = np.take_along_axis(ours, batch.ids_BT[:, 1:, None], axis=-1)[..., 0] - batch.sampled_BS
    terms = np.where(batch.mask_BS, np.exp(apart) - 1 - apart, 0)
    assert found.k3 == pytest.approx(terms.sum() / batch.mask_BS.sum(), rel=1e-5)
    assert found.worst_sample == pytest.approx((terms.sum(axis=1) / batch.mask_BS.sum(axis=1)).max(), rel=1e-5)
    assert found.far == pytest.approx((np.abs(apart) > np.log(2))[batch.mask_BS].mean())
    same = distance(answers, batch, theirs)
    assert same.exact == pytest.approx(0, abs=1e-7) and same.k3 == 0 == same.far


def test_the_law_is_of_all_probes_pooled_by_their_tokens():
    def probe(policy, tokens, replayed, free):
        near = Distance(k3=replayed, exact=replayed, far=0.0, worst_sample=replayed)
        return Probe("run", policy, tokens, near, replace(near, k3=free, exact=free, far=0.01))

    probes = [probe("step-000", 100, 1e-4, 5e-4), probe("step-005", 300, 1e-4, 2e-3)]
    told = law_table(probes)
    assert "holds: 16.2 by k3, 16.2 by exact KL" in told and "step-000, 5.0 by k3" in told
    assert "does not hold: 5.0" in law_table(probes[:1])
    assert [read_probe(json.loads(json.dumps(written(each)))) for each in probes] == probes


def test_the_tables_of_the_ablation_state_medians_and_what_is_caught():
    def run(top, *, refused, controls):
        last = {"reward": top, "differences": 0.9, "sums": 0.8}
        rows = [{"step": 0, "held_out": 0.4}]
        for step in (1, 2, 3):
            row = {
                "step": step,
                "held_out": step * top / 3,
                "kl": 1e-5 * step,
                "refused": refused,
                "controls": controls,
            }
            rows.append({**row, **last})
        return rows

    controls = {"stale": 0.001, "wholly shifted": 3.0}
    runs = {"replay": [run(top, refused="", controls=controls) for top in (0.93, 0.95, 0.99)], "free": []}
    runs["permuted"] = [run(0.7, refused="shifted rows", controls={})]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables(runs, max_kl=0.01).splitlines()]
    by_name = {line[0]: line[1:] for line in lines if line}
    assert by_name["replay"] == ["3", "3", "3 (3 of 3)", "0.950", "0.950", "0.900", "0.800", "2.0e-05", "0%"]
    assert by_name["permuted"][2] == "never" and by_name["permuted"][-1] == "100%" and "free" not in by_name
    assert by_name["as served"] == ["9", "1.0e-05", "2.0e-05", "3.0e-05", "0%"]
    assert by_name["stale"][-1] == "0%" and by_name["wholly shifted"][-1] == "100%"
    means = mean_rows(runs["replay"])
    assert [row["step"] for row in means] == [0, 1, 2, 3] and means[3]["reward"] == pytest.approx(
        np.mean([0.93, 0.95, 0.99])
    )
    assert "reward" not in means[0]
