"""The page of known fields, written from the table: `python -m tests.architecture.fields_page` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rayserve_moe.serving.api.schemas.known_fields import (
    NOTHING,
    OBJECTS,
    PLACES,
    TABLE,
    KnownFields,
    known_fields,
    plain_objects,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http_fields.md"
_OFF = ", ".join(f"`{json.dumps(value)}`" for value in NOTHING)
INTRODUCTION = f"""# Request fields

Written from `src/{TABLE.relative_to(PAGE.parents[1] / "src")}`, and served to programs at
`GET /v1/fields`. Every field that vLLM, SGLang or OpenAI define for a body stands here. *Computed* fields have their
effect. *Accepted* ones change nothing in the answer. *Refused* ones would change it and are not computed: they are
answered 400 by name, unless their value switches them off ({_OFF}, and what stands in brackets).

Any field may be null, which is the same as not given. A name that is not in the list of an object within a body, such
as `sampling_params`, is answered 400 with the nearest name that is. So is a name at the top level
that is one edit away from a known one of at least five characters: a character more, less or other, or two swapped.
Other names there, and those that other routes know, are ignored, logged once and listed in the answer's header
`x-ignored-fields`: percent-encoded, 16 names of at most 64 characters, then `+` and how many more.

Options of `/pause`, `/abort_requests`, `/flush_cache`, `/reset_prefix_cache` and `/update_weight_version` may stand in
the query as well, and those of the query count.

Where one name means two things, the route decides, as its own system does:

| name | `/generate` (SGLang) | `/v1/*`, `/inference/v1/*` (vLLM) |
|---|---|---|
| `priority` | larger values first | smaller values first |
| `min_new_tokens`, `min_tokens` | hold back ids alone | hold back ids, strings, patterns |
| `top_logprobs_num`, `top_logprobs` | the likeliest tokens | the sampled token, then the likeliest |
| `max_new_tokens`, `max_tokens` left out | 128 | 16; in chats, what the context holds |

Requests that wait are admitted in the order of their priority; those that run are not preempted for it. `stop_regex` is
matched by RE2, in time linear in the text: there are no references back and no look-around. A pattern that is trimmed
from the text holds back as many characters of a stream as it can match, and all of them until the end where that is not
bounded (`a+`) or not known (`[[:alpha:]]`, `\\Q`, `\\p`).

Log-probs of outputs are of the distribution that is sampled before truncation: after masks, bias, penalties and
temperature, which counts as 1 where it is 0. `logprobs_mode: "raw_logprobs"` has them be the model's own, before all
that, as those of prompts are; the setting of that name says what they are where a request does not.
`logprob_token_ids` (up to 128 ids, beside `logprobs`) come after the sampled token in the place of the likeliest
ones, without rank. On `/generate` they are called `token_ids_logprob`, and stand in `output_token_ids_logprobs` where
`return_logprob` is true; entropies in nats in `output_token_entropy`. `return_sampling_mask` returns the ids that
truncation left at every output (`output_token_sampling_mask`; with more than 4096 the choice ends with an error), and
the log-prob of the output among them; [decisions](rl/decisions.md) has more. These fields, arguments of
[logit processors](logit_processors.md), and `raw_logprobs` where it differs, need the setting `structured_output`: such
samples are drawn by a program of their own, and without drafts.

With the setting `enable_return_hidden_states` a server returns states of the last layer after the final norm:
`return_hidden_states: true` on `/generate` those of all prompt tokens, then of each output but the last, as lists in
`meta_info.hidden_states`; `"last"`, and `true` on OpenAI's routes, the one that the last output was drawn from. So are
`/v1/embeddings` (the state at the last token, as a unit vector) and vLLM's form of `/v1/score` (the cosine of two).
Ids are listed at prompt positions by `token_ids_logprob` beside `logprob_start_len` on `/generate`, and by rows of ids
in `prompt_logprob_token_ids` on `/inference/v1/generate`, whose log-probs come as vLLM's base64 of a `.npy` file.
Probed tokens are computed even where their keys are cached; none is missing.
"""


def page() -> str:
    """Return the page's text."""
    return "\n".join([INTRODUCTION, *(section for key in OBJECTS for section in _sections(key))])


def _sections(key: str) -> Iterator[str]:
    routes, place = PLACES[key]
    paths = ", ".join(f"`{path}`" for path in routes)
    yield _section(f"`POST {paths[1:]}" if place == "body" else f"`{place}` of {paths}", known_fields(key))
    for name, known in plain_objects(key).items():
        yield _section(f"`{name}` of {paths}", known)


def _section(title: str, known: KnownFields) -> str:
    computed = [f"`{name}`" for name in sorted(known.computed)]
    computed += [f"`{other}` (`{own}`)" for other, own in sorted(known.other_names.items())]
    refused = [_switched_off(name, known.refused[name]) for name in sorted(known.refused)]
    lists = {"Computed": computed, "Accepted": [f"`{name}`" for name in sorted(known.accepted)], "Refused": refused}
    rows = [f"- {name}: {', '.join(fields)}." for name, fields in lists.items() if fields]
    return "\n".join([f"## {title}", "", *rows, ""])


def _switched_off(name: str, values: tuple) -> str:
    told = f" [{', '.join(f'`{json.dumps(value)}`' for value in values)}]" if values else ""
    return f"`{name}`{told}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
