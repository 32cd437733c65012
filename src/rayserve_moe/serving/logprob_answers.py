"""Log-probs in answers of the OpenAI and token dialects, written piece after piece of a choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat, zip_longest
from typing import Protocol

from rayserve_moe.engine.answers import ChoiceResult, likeliest
from rayserve_moe.requests import GenerationRequest, TopLogprobs
from rayserve_moe.text.detokenizer import IncrementalDetokenizer
from rayserve_moe.text.tokenizer import Tokenizer

Likeliest = list[tuple[float, int]]


class LogprobWriter(Protocol):
    """Writes the `logprobs` object of what is new to one choice."""

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        ...


class CompletionLogprobs:
    """Of one choice of `/v1/completions`. `top_logprobs` is null unless likeliest tokens were asked for.

    `text_offset` counts the characters of the choice's text before each token. With `echo` the prompt comes first, and
    its first token has no log-prob.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, *, echo: bool) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._offset = 0
        self._owes_prompt = echo
        skip_special_tokens = request.sampling.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        written: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._owes_prompt:
            self._owes_prompt = False
            self._add_prompt(written, news)
        tops = _tops(news.top, len(news.token_ids))
        self._add(written, zip(news.token_ids, news.logprobs, tops, strict=True), self._detokenizer)
        return written if self._request.num_top_logprobs else {**written, "top_logprobs": None}

    def _add_prompt(self, written: dict[str, list], news: ChoiceResult) -> None:
        scores, prompt_ids = news.prompt_scores, self._request.prompt_ids.tolist()
        logprobs = [] if scores is None else scores.logprobs.tolist()
        tops = [] if scores is None else _tops(scores.top, len(logprobs))
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        self._add(written, zip_longest(prompt_ids, [None, *logprobs], [None, *tops]), detokenizer)
        self._offset += len(detokenizer.flush())

    def _add(self, written: dict[str, list], entries: Iterable[tuple], detokenizer: IncrementalDetokenizer) -> None:
        for token_id, logprob, top in entries:
            token = self._tokenizer.token_text(token_id)
            written["tokens"].append(token)
            written["token_logprobs"].append(logprob)
            written["top_logprobs"].append(None if logprob is None else self._by_text(token, logprob, top))
            written["text_offset"].append(self._advance(len(token), detokenizer.push(token_id)))

    def _by_text(self, token: str, logprob: float, top: Likeliest) -> dict[str, float]:
        """Log-probs by text, the token's own among them; of tokens that read alike the likeliest counts."""
        by_text: dict[str, float] = {}
        for other, token_id in top:
            by_text.setdefault(self._tokenizer.token_text(token_id), other)
        by_text.setdefault(token, logprob)
        return by_text

    def _advance(self, token_length: int, piece: str) -> int:
        """Return where the token begins: half a character before it may have come out with it, and is not its own."""
        before = self._offset
        self._offset += len(piece)
        return max(before, self._offset - token_length)


class ChatLogprobs:
    """Of one choice of `/v1/chat/completions`."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        content = [
            {**self._entry(token_id, logprob), "top_logprobs": [self._entry(other, value) for value, other in top]}
            for token_id, logprob, top in _with_tops(news)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict:
        text, spelled = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}


class TokenLogprobs:
    """Of one choice of `/inference/v1/generate`: tokens are named by ids, the likeliest told where several are."""

    def __init__(self, *, num_top: int) -> None:
        self._num_top = num_top if num_top > 1 else 0

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        return {"content": [self._entry(*entry) for entry in _with_tops(news)]}

    def _entry(self, token_id: int, logprob: float, top: Likeliest) -> dict:
        entry: dict = {"token": f"token_id:{token_id}", "logprob": logprob}
        if self._num_top:
            entry["top_logprobs"] = [
                {"token": f"token_id:{other}", "logprob": value} for value, other in top[: self._num_top]
            ]
        return entry


def echoed_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a prompt, special tokens spelled out."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def _with_tops(news: ChoiceResult) -> Iterable[tuple[int, float, Likeliest]]:
    return zip(news.token_ids, news.logprobs, _tops(news.top, len(news.token_ids)), strict=True)


def _tops(top: TopLogprobs | None, count: int) -> Iterable[Likeliest]:
    return repeat([], count) if top is None else likeliest(top)
