"""Log-probs of new output in answers of the OpenAI and token dialects."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Sequence, Set

from rayserve_moe.answers.native import TokenLogprob, output_logprobs, prompt_logprobs_of
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.schemas.openai import CompletionBody
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, Tokenizer

MAX_ADDED_IDS = 4
"""Maximum number of special tokens that a tokenizer is expected to put before a text."""


class CompletionLogprobs:
    """The `logprobs` object of a choice of `/v1/completions`; `top_logprobs` is by text, the token itself first.

    `text_offset` counts the characters of the choice's text before each token. With `echo` the prompt comes first, and
    its first token has no log-prob. With `return_tokens_as_token_ids` tokens are named `token_id:N`.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: GenerationRequest, *, body: CompletionBody, prompt_text: str | None
    ) -> None:
        """Begin a choice; `prompt_text` is the prompt as sent, None if it was sent as ids."""
        self._tokenizer, self._request, self._num_top = tokenizer, request, body.logprobs or 0
        self._listed = request.logprob_token_ids
        self._name = token_name if body.return_tokens_as_token_ids else tokenizer.token_text
        self._echo_pending, self._prompt_text = body.echo, prompt_text
        hidden_ids = tokenizer.special_ids if request.sampling.skip_special_tokens else frozenset()
        self._offsets = TextOffsets(tokenizer, hidden_ids=hidden_ids, continues=True)

    def write(self, delta: ChoiceResult) -> dict:
        """Return the object for the tokens in `delta`."""
        token_ids, offsets = list(delta.token_ids), []
        scored: list[list[TokenLogprob] | None] = []
        if self._echo_pending:
            self._echo_pending = False
            prompt_ids = self._request.prompt_ids.tolist()
            token_ids = [*prompt_ids, *token_ids]
            scored += prompt_logprobs_of(delta, prompt_ids, num_top=self._num_top)
            offsets, self._offsets.start = prompt_offsets(self._tokenizer, prompt_ids, text=self._prompt_text)
        scored += output_logprobs(delta, num_top=self._num_top, listed_ids=self._listed)
        return {
            "tokens": list(map(self._name, token_ids)),
            "token_logprobs": [likeliest and likeliest[0].logprob for likeliest in scored],
            "top_logprobs": [likeliest and self._by_name(likeliest) for likeliest in scored],
            "text_offset": offsets + list(map(self._offsets.push, delta.token_ids)),
        }

    def _by_name(self, tokens: Sequence[TokenLogprob]) -> dict[str, float]:
        """Return log-probs by text: the maximum over tokens with the same text."""
        by_name: dict[str, float] = {}
        for token in tokens:
            name = self._name(token.token_id)
            by_name[name] = max(token.logprob, by_name.get(name, token.logprob))
        return by_name


class TextOffsets:
    """Offsets of tokens in their text, in characters. A token that completes a character begins before it."""

    def __init__(self, tokenizer: Tokenizer, *, hidden_ids: Set[int], continues: bool) -> None:
        """Begin a text, or continue one if `continues`; `hidden_ids` add no characters."""
        self.start = 0
        """Offset of the text itself."""
        self._tokenizer, self._hidden_ids = tokenizer, hidden_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=hidden_ids, continues=continues)
        self._length = 0
        self._held = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_held = 0

    def push(self, token_id: int) -> int:
        """Take the next token and return its offset."""
        piece, before = self._detokenizer.push(token_id), self._length + self._num_held
        if piece:
            self._length, self._num_held = self._length + len(piece), 0
            self._held.reset()
            return self.start + max(before, self._length - len(self._tokenizer.token_text(token_id)))
        if self._tokenizer.is_byte(token_id) and token_id not in self._hidden_ids:
            self._num_held += len(self._held.decode(self._tokenizer.token_bytes(token_id)))
        return self.start + before

    def finish(self) -> int:
        """End the text and return the offset of its end."""
        return self.start + self._length + len(self._detokenizer.flush())


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], *, text: str | None) -> tuple[list[int], int]:
    """Return the offset of each token of an echoed prompt, and the offset of the answer.

    A prompt sent as `text` is echoed unchanged. Tokens added by the tokenizer have no characters in it, and offsets
    count its characters even if a normalizer changes its length. `text` is None for a prompt sent as ids.
    """
    num_added = 0 if text is None else num_added_ids(tokenizer, token_ids, text=text)
    counted = TextOffsets(tokenizer, hidden_ids=frozenset(), continues=False)
    offsets = [0] * num_added + list(map(counted.push, token_ids[num_added:]))
    end = counted.finish()
    if text is None or text == echoed_text(tokenizer, token_ids[num_added:]):
        return offsets, end
    for add_special_tokens in (True, False):
        found, starts = tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
        if found == list(token_ids):
            return starts, len(text)
    return [min(offset, len(text)) for offset in offsets], len(text)


def token_name(token_id: int) -> str:
    """Return the name of a token for answers with ids instead of texts."""
    return f"token_id:{token_id}"


def chat_logprobs(
    tokenizer: Tokenizer,
    delta: ChoiceResult,
    *,
    num_top: int,
    listed_ids: Sequence[int] = (),
    as_ids: bool = False,
) -> dict:
    """Return the object of a chat choice; as in vLLM, `top_logprobs` begins with the token itself.

    Tokens are named by their text, or by id if `as_ids`; `bytes` encodes the text.
    """
    name = token_name if as_ids else tokenizer.token_text

    def entry(token: TokenLogprob) -> dict:
        spelled = tokenizer.token_bytes(token.token_id)
        return {"token": name(token.token_id), "logprob": token.logprob, "bytes": list(spelled)}

    return {"content": _content(delta, entry, num_top, listed_ids), "refusal": None}


def token_logprobs(delta: ChoiceResult, *, num_logprobs: int, listed_ids: Sequence[int] = ()) -> dict:
    """Return the object of a choice of `/inference/v1/generate`; `num_logprobs` above 1 adds the likeliest tokens.

    A listed token has no rank.
    """

    def entry(token: TokenLogprob) -> dict:
        name = token_name(token.token_id)
        return {"token": name, "token_id": token.token_id, "logprob": token.logprob, "rank": token.rank}

    return {"content": _content(delta, entry, num_logprobs if num_logprobs > 1 else 0, listed_ids)}


def _content(
    delta: ChoiceResult, entry: Callable[[TokenLogprob], dict], num_top: int, listed_ids: Sequence[int]
) -> list[dict]:
    shown = 1 + len(listed_ids) if listed_ids else num_top
    return [
        {**entry(tokens[0]), "top_logprobs": list(map(entry, tokens[:shown]))}
        for tokens in output_logprobs(delta, num_top=num_top, listed_ids=listed_ids)
    ]


def echoed_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a prompt with its special tokens spelled out."""
    detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=frozenset())
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def num_added_ids(tokenizer: Tokenizer, token_ids: Sequence[int], *, text: str) -> int:
    """Return the number of leading special tokens that `text` does not spell out, because the tokenizer added them."""
    leading = list(itertools.takewhile(tokenizer.special_ids.__contains__, token_ids))
    for count in range(min(len(leading), MAX_ADDED_IDS) + 1):
        if text.startswith("".join(map(tokenizer.token_text, leading[count:]))):
            return count
    return 0
