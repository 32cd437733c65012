"""Few tokens are kept whole by the devices of a tensor group: each takes as its own those of its part."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.experts.low_latency import FEW_TOKENS, _mine_alone
from rayserve_moe.experts.tokens import RoutedTokens, take_part


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, FEW_TOKENS])
def test_own_tokens_are_those_of_the_part(num_tokens, num_parts):
    generator = np.random.default_rng(num_tokens)
    valid = generator.random(num_tokens) < 0.8
    hidden = np.arange(1, 1 + num_tokens)[:, None]
    tokens = RoutedTokens(*(jnp.asarray(array) for array in (hidden, hidden, hidden, valid)))
    taken = np.zeros(num_tokens, int)
    for part in range(num_parts):
        own, cut = (of(tokens, jnp.int32(part), num_parts=num_parts) for of in (_mine_alone, take_part))
        assert own.hidden_TD.shape == hidden.shape
        mine = [np.asarray(each.hidden_TD)[np.asarray(each.valid_T), 0].tolist() for each in (own, cut)]
        # Where tokens do not fill all parts, those behind the last one are that one again: here they have none.
        has_tokens = part * -(-num_tokens // num_parts) < num_tokens
        assert mine[0] == (mine[1] if has_tokens else [])
        taken += np.asarray(own.valid_T)
    assert (taken == valid).all()
