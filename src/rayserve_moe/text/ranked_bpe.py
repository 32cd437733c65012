"""Tokenizers of the tokenizers library from a vocabulary by rank, with the ids of tiktoken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rayserve_moe.config.given_files import GivenFileError
from rayserve_moe.text.rank_files import CONFIG_FILE, RankedTokens
from rayserve_moe.text.token_forms import spelling_of


def ranked_backing(ranked: RankedTokens, directory: Path, *, config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a vocabulary, configured by `tokenizer_config.json` and the template files.

    Raises: GivenFileError if `tokenizer_config.json` names a token that the vocabulary lacks.
    """
    built, names = ranked_tokenizer(ranked), {token.content for token in ranked.special.values()}

    def token_of(role: str) -> Any:
        usual = ranked.roles.get(role)
        return config.get(role, usual if usual in names else None)

    # An empty `vocab_file` keeps transformers from reading a rank file by its own pattern.
    backing = PreTrainedTokenizerFast.from_pretrained(
        directory,
        tokenizer_object=built,
        vocab_file="",
        local_files_only=True,
        bos_token=token_of("bos_token"),
        eos_token=token_of("eos_token"),
        unk_token=token_of("unk_token"),
        pad_token=token_of("pad_token"),
        add_bos_token=config.get("add_bos_token", ranked.adds_bos),
    )
    if len(backing) != built.get_vocab_size():
        unknown = sorted(backing.get_vocab().keys() - built.get_vocab().keys())
        raise GivenFileError(f"{CONFIG_FILE}: the vocabulary has no token {unknown[0]!r}")
    return backing


def ranked_tokenizer(ranked: RankedTokens) -> Tokenizer:
    """Return a byte-level BPE with the ids of tiktoken, which knows ranks alone.

    Every split of a token into two others is a merge. Inside a token BPE takes the same steps in every text, so a text
    uses a single merge per token: the last step from the token's bytes. Hence the ids equal those of tiktoken.

    Raises: GivenFileError if a special token is empty, or spelled like another token.
    """
    spelled, known = list(map(spelling_of, ranked.tokens)), set(ranked.tokens)
    special = {token.content: token_id for token_id, token in ranked.special.items()}
    vocabulary = {spelling: ranked.first_id + rank for rank, spelling in enumerate(spelled)}
    if len(special) != len(ranked.special) or "" in special or special.keys() & vocabulary.keys():
        raise GivenFileError("a special token is empty, or is spelled like another token")
    vocabulary |= special
    merges = [
        (spelling[:cut], spelling[cut:])
        for token, spelling in zip(ranked.tokens, spelled, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    # A piece that is a token becomes that token, even if no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if ranked.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(ranked.pattern), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([ranked.special[token_id] for token_id in sorted(ranked.special)])
    return tokenizer
