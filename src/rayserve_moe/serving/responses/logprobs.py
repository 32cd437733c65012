"""Log-probs in answers of the OpenAI and token dialects, written piece after piece of a choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rayserve_moe.engine.answers import ChoiceResult, ToldToken, told_outputs, told_prompt
from rayserve_moe.requests import GenerationRequest
from rayserve_moe.text.detokenizer import IncrementalDetokenizer
from rayserve_moe.text.tokenizer import Tokenizer


class LogprobWriter(Protocol):
    """Writes the `logprobs` object of what is new to one choice."""

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        ...


class CompletionLogprobs:
    """Of one choice of `/v1/completions`. `top_logprobs` tell by text the token itself, then the likeliest ones.

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
        num_top = self._request.num_top_logprobs
        if self._owes_prompt:
            self._owes_prompt = False
            prompt_ids = self._request.prompt_ids.tolist()
            detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
            told = told_prompt(news.prompt_scores, prompt_ids, num_top=num_top)
            self._add(written, zip(prompt_ids, told, strict=True), detokenizer)
            self._offset += len(detokenizer.flush())
        self._add(written, zip(news.token_ids, told_outputs(news, num_top=num_top), strict=True), self._detokenizer)
        return written

    def _add(
        self,
        written: dict[str, list],
        entries: Iterable[tuple[int, list[ToldToken] | None]],
        detokenizer: IncrementalDetokenizer,
    ) -> None:
        for token_id, told in entries:
            token = self._tokenizer.token_text(token_id)
            written["tokens"].append(token)
            written["token_logprobs"].append(told and told[0].logprob)
            written["top_logprobs"].append(told and self._by_text(told))
            written["text_offset"].append(self._advance(len(token), detokenizer.push(token_id)))

    def _by_text(self, told: Sequence[ToldToken]) -> dict[str, float]:
        """Log-probs by text; of tokens that read alike the likeliest counts."""
        by_text: dict[str, float] = {}
        for token in told:
            text = self._tokenizer.token_text(token.token_id)
            by_text[text] = max(token.logprob, by_text.get(text, token.logprob))
        return by_text

    def _advance(self, token_length: int, piece: str) -> int:
        """Return where the token begins: half a character before it may have come out with it, and is not its own."""
        before = self._offset
        self._offset += len(piece)
        return max(before, self._offset - token_length)


class ChatLogprobs:
    """Of one choice of `/v1/chat/completions`: of `top_logprobs` the token itself is the first, as with vLLM."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer, self._num_top = tokenizer, request.num_top_logprobs

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        content = [
            {**self._entry(told[0]), "top_logprobs": list(map(self._entry, told[: self._num_top]))}
            for told in told_outputs(news, num_top=self._num_top)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, told: ToldToken) -> dict:
        text, spelled = self._tokenizer.token_text(told.token_id), self._tokenizer.token_bytes(told.token_id)
        return {"token": text, "logprob": told.logprob, "bytes": list(spelled)}


class TokenLogprobs:
    """Of one choice of `/inference/v1/generate`: as many as are asked for, itself first, if more than one."""

    def __init__(self, *, num_top: int) -> None:
        self._num_top = num_top if num_top > 1 else 0

    def write(self, news: ChoiceResult) -> dict:
        """Return the object for the tokens in `news`."""
        content = [
            {**_token_entry(told[0]), "top_logprobs": list(map(_token_entry, told[: self._num_top]))}
            for told in told_outputs(news, num_top=self._num_top)
        ]
        return {"content": content}


def _token_entry(told: ToldToken) -> dict:
    name = f"token_id:{told.token_id}"
    return {"token": name, "token_id": told.token_id, "logprob": told.logprob, "rank": told.rank}


def echoed_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of a prompt, special tokens spelled out."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
