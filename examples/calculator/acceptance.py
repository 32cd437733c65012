"""How many tokens a verification gives with a trained draft model, by three ways to draw and to accept drafts."""

# B rows   T tokens of a row   V words   W words of the head   S steps of drafting

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.calculator.batches import Batch
from examples.calculator.drafting import Form, draft, target_scores
from examples.calculator.network import Scores, Weights
from examples.calculator.problems import END, MIX
from examples.calculator.problems import draw as draw_problem
from rayserve_moe.model.spec import ModelSpec

PROBLEMS, WIDTH, AHEAD = 256, 20, 3
COLD = 1e-3
"""The temperature that stands for none."""


class Lengths(NamedTuple):
    """Tokens per verification: drafts of the target's noise, the likeliest drafts, and rejection sampling."""

    shared_noise: float
    likeliest: float
    rejection: float


def accepted_lengths(head: Weights, target: Weights, form: Form, *, temperature: float, seed: int = 0) -> Lengths:
    """Measure on answers to held-out problems, at every token of them: drafts are made after the true tokens before.

    Rejection sampling with drafts of their own noise accepts a token x that the target has sampled with probability
    min(1, q(x) / p(x)) (arXiv:2211.17192), so that its length needs no drafts.
    """
    spec, heat = form.target, max(temperature, COLD)
    prompts = _prompts(seed)
    noise_BTV = np.random.default_rng(seed).gumbel(size=(len(prompts), WIDTH + AHEAD + 2, spec.vocab_size))
    batch = _answered(prompts, target, spec, noise_BTV=noise_BTV * (temperature > 0), heat=heat)
    scores = _scoring(spec)(target, batch)
    ahead = draft(head, target, scores, batch, form=form, ahead=AHEAD)
    words, places = np.array(form.words), np.arange(WIDTH)
    starts = np.array([len(prompt) for prompt in prompts])[:, None] - 1
    right: dict[str, list[np.ndarray]] = {name: [] for name in Lengths._fields}
    counted = np.asarray(ahead.is_there[0]) & (places >= starts)
    for step in range(AHEAD):
        drafted = np.asarray(jax.nn.softmax(ahead.logits[step] / heat))
        true_ids = np.roll(batch.ids_BT, -2 - step, axis=1)
        wanted = np.asarray(jax.nn.softmax(jnp.roll(scores.logits_BTV, -1 - step, axis=1) / heat))[..., words]
        of_position = noise_BTV[:, 2 + step : 2 + step + WIDTH][..., words] * (temperature > 0)
        by_noise = words[(np.log(drafted + 1e-30) + of_position).argmax(-1)]
        there = np.asarray(ahead.is_there[step])
        right["shared_noise"].append((by_noise == true_ids) & there)
        right["likeliest"].append((words[drafted.argmax(-1)] == true_ids) & there)
        ratio = _of_ids(true_ids, drafted, words) / np.maximum(_of_ids(true_ids, wanted, words), 1e-30)
        right["rejection"].append(np.minimum(ratio, 1.0) * there)
    return Lengths(*(1 + float(np.cumprod(right[name], axis=0).sum(0)[counted].mean()) for name in Lengths._fields))


def _of_ids(ids_BT: np.ndarray, shares_BTW: np.ndarray, words: np.ndarray) -> np.ndarray:
    """The share of each id out of those of all words; none of one that is no word."""
    found_BT = np.searchsorted(words, ids_BT).clip(max=len(words) - 1)
    shares_BT = np.take_along_axis(shares_BTW, found_BT[..., None], axis=-1)[..., 0]
    return np.where(words[found_BT] == ids_BT, shares_BT, 0.0)


def table(found: Mapping[float, Lengths]) -> str:
    """Lines of text."""
    lines = [f"tokens per verification of up to {AHEAD} drafts", "temperature  shared noise  likeliest  rejection"]
    lines += [f"{heat:11.1f}  {a:12.3f}  {b:9.3f}  {c:9.3f}" for heat, (a, b, c) in found.items()]
    return "\n".join(lines)


@cache
def _scoring(spec: ModelSpec) -> Callable[[Weights, Batch], Scores]:
    return jax.jit(partial(target_scores, spec=spec))


def _prompts(seed: int) -> list[bytes]:
    generator = random.Random(seed)
    tasks, shares = zip(*MIX, strict=True)
    drawn = (draw_problem(generator.choices(tasks, shares)[0], generator, held_out=True) for _ in range(PROBLEMS))
    return [problem.prompt.encode() for problem in drawn]


def _answered(prompts: list[bytes], target: Weights, spec: ModelSpec, *, noise_BTV: np.ndarray, heat: float) -> Batch:
    """The prompts with what the target samples after them, up to the end of the answer."""
    ids_BT = np.zeros((len(prompts), WIDTH), np.int32)
    segments_BT = np.full(ids_BT.shape, -1, np.int32)
    for row, prompt in enumerate(prompts):
        ids_BT[row, : len(prompt)] = list(prompt)
        segments_BT[row, : len(prompt)] = 0
    ended = np.zeros(len(prompts), bool)
    for place in range(min(map(len, prompts)), WIDTH):
        batch = Batch(ids_BT, segments_BT, segments_BT >= 0)
        logits_BV = np.asarray(_scoring(spec)(target, batch).logits_BTV[:, place - 1])
        sampled = (logits_BV / heat + noise_BTV[:, place]).argmax(-1)
        grows = (segments_BT[:, place] < 0) & ~ended
        ids_BT[grows, place], segments_BT[grows, place] = sampled[grows], 0
        ended |= grows & (sampled == ord(END))
    return Batch(ids_BT, segments_BT, segments_BT >= 0)
