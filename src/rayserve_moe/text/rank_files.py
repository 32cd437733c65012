"""Tokenizers from files with a byte-level vocabulary by rank: tiktoken's, and Mistral's `tekken.json`.

A tiktoken file has neither special tokens nor the pattern that splits a text. The tokenizer code of the checkpoint has
them. That code is never run; `KNOWN_CODE` states its facts.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rayserve_moe.config.given_files import MAX_JSON_BYTES, GivenFileError, opened, read_json_object
from rayserve_moe.text.token_forms import spelling_of

CONFIG_FILE = "tokenizer_config.json"
TEKKEN_FILE = "tekken.json"
MAX_NUM_SPECIAL = 1 << 16
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HUNYUAN_NAMES = ("endoftext", "startoftext", "bos", "eos", "pad", *(f"extra_{number}" for number in range(205)))
TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEKKEN_NAMES = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of `tekken.json` files that do not list them, which versions up to 7 may omit."""
_VERSIONS_WITHOUT_NAMES = ("v1", "v2", "v3", "v7")


@dataclass(frozen=True)
class RankedTokens:
    """A byte-level vocabulary with its special tokens, and the pattern that splits a text."""

    tokens: tuple[bytes, ...]
    """Bytes of each rank."""
    first_id: int
    """Id of rank 0."""
    special: Mapping[int, AddedToken]
    """Special tokens by id. Each id from 0 to the maximum has a rank or a special token."""
    pattern: str
    is_nfc: bool = False
    """True if a text is normalized to NFC before it is split."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Default tokens of roles such as `bos_token`, used if `tokenizer_config.json` lacks them."""
    adds_bos: bool = False
    """True if a text begins with the bos token, unless `tokenizer_config.json` says otherwise."""


@dataclass(frozen=True)
class TokenizerCode:
    """Facts about the tokenizer code of a checkpoint."""

    file: str
    pattern: str
    num_special: int
    """Number of special ids."""
    names: tuple[str, ...] = ()
    """Names of the first special ids; the others are `<|reserved_token_ID|>`."""
    is_nfc: bool = False


_KIMI = TokenizerCode(
    "tiktoken.model",
    "|".join(
        (
            r"[\p{Han}]+",
            f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_ENDING}?",
            f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_ENDING}?",
            r"\p{N}{1,3}",
            _OTHERS,
        )
    ),
    num_special=256,
)
KNOWN_CODE = {
    "tokenization_kimi.TikTokenTokenizer": _KIMI,
    "tokenization_moonshot.TikTokenTokenizer": _KIMI,
    "tokenization_hy.HYTokenizer": TokenizerCode(
        "hy.tiktoken",
        "|".join((_ENDING, rf"{_BEFORE_WORD}\p{{L}}+", r"\p{N}", _OTHERS)),
        num_special=len(_HUNYUAN_NAMES),
        names=tuple(f"<|{name}|>" for name in _HUNYUAN_NAMES),
        is_nfc=True,
    ),
}
"""Tokenizer code by the name in `auto_map`: Kimi-K2, Moonlight, and Hunyuan-A13B."""
RANK_FILES = (TEKKEN_FILE, *dict.fromkeys(code.file for code in KNOWN_CODE.values()))


def code_named(config: Mapping[str, Any]) -> str | None:
    """Return the tokenizer code that a `tokenizer_config.json` names, or None without a name."""
    named = config.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str):
            return name.rpartition("--")[2]
    return None


def read_rank_file(file: Path, config: Mapping[str, Any]) -> RankedTokens:
    """Read a file of `RANK_FILES`; the content `config` of `tokenizer_config.json` may rename special tokens.

    Raises: GivenFileError if a file is damaged, or if the checkpoint's tokenizer code is unknown.
    """
    with _blamed(file.name):
        ranked = _tekken_tokens(read_json_object(file)) if file.name == TEKKEN_FILE else _tiktoken_tokens(file, config)
    with _blamed(CONFIG_FILE):
        named = _added_tokens(config)
        others = sorted(named.keys() - ranked.special.keys())
        if others:
            raise GivenFileError(
                f"added_tokens_decoder has id {others[0]}, but special tokens have the ids "
                f"{min(ranked.special, default=0)} to {max(ranked.special, default=0)}"
            )
    return replace(ranked, special={**ranked.special, **named})


@contextmanager
def _blamed(name: str) -> Generator[None]:
    """Put a file's name before the message of a GivenFileError."""
    try:
        yield
    except GivenFileError as error:
        raise GivenFileError(f"{name}: {error}") from error


def _added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens in `added_tokens_decoder` by id."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        return {int(token_id): AddedToken(**token) for token_id, token in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise GivenFileError(f"added_tokens_decoder: {error}") from error


def _tiktoken_tokens(file: Path, config: Mapping[str, Any]) -> RankedTokens:
    """Read a tiktoken file. Special tokens follow the ranks."""
    name = code_named(config)
    code = KNOWN_CODE.get(name or "")
    if code is None or code.file != file.name:
        raise GivenFileError(
            f"the pattern that splits a text is unknown for {name or 'a checkpoint that names no tokenizer code'}; "
            f"a tokenizer.json would do. Known by auto_map in {CONFIG_FILE}: {', '.join(KNOWN_CODE)}"
        )
    with opened(file) as given:
        if given.num_bytes > MAX_JSON_BYTES:
            raise GivenFileError(f"{given.num_bytes} bytes are more than {MAX_JSON_BYTES}")
        tokens = _by_rank(_lines(given.read(given.num_bytes)))
    ids = range(len(tokens), len(tokens) + code.num_special)
    names = [*code.names, *(f"<|reserved_token_{token_id}|>" for token_id in ids[len(code.names) :])]
    special = _special_tokens(names, first_id=ids.start)
    return RankedTokens(tokens, first_id=0, special=special, pattern=code.pattern, is_nfc=code.is_nfc)


def _lines(content: bytes) -> Iterable[tuple[bytes, int]]:
    """Yield token and rank of each line of a tiktoken file."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            yield b64decode(encoded, validate=True), int(rank)
        except ValueError as error:
            raise GivenFileError(f"line {number} is not a token in base64 and its rank") from error


def _by_rank(ranked: Iterable[tuple[bytes, int]]) -> tuple[bytes, ...]:
    """Return the tokens in the order of their ranks.

    Raises: GivenFileError if a rank or token repeats, a rank below the maximum is missing, a token is empty, or a byte
    has no token.
    """
    tokens: dict[int, bytes] = {}
    for token, rank in ranked:
        if rank in tokens:
            raise GivenFileError(f"rank {rank} has two tokens")
        tokens[rank] = token
    known = set(tokens.values())
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    lost = [byte for byte in range(256) if bytes([byte]) not in known]
    if lost:
        raise GivenFileError(f"byte {lost[0]} has no token")
    if missing is not None:
        raise GivenFileError(f"rank {missing} has no token")
    if len(known) != len(tokens) or b"" in known:
        raise GivenFileError("a token is empty or has two ranks")
    return tuple(tokens[rank] for rank in range(len(tokens)))


def _special_tokens(names: Sequence[str], *, first_id: int) -> dict[int, AddedToken]:
    return {first_id + i: AddedToken(name, normalized=False, special=True) for i, name in enumerate(names)}


def _tekken_tokens(content: Mapping[str, Any]) -> RankedTokens:
    """Read a `tekken.json`. Special tokens come first; ranks beyond the vocabulary size are left out."""
    config, entries = content.get("config"), content.get("vocab")
    if not isinstance(config, dict) or not isinstance(entries, list):
        raise GivenFileError("it has no config or no vocab")
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise GivenFileError("its config has no pattern")
    if "}+" in pattern:
        raise GivenFileError("its pattern has a possessive interval, which the tokenizers library reads otherwise")
    names = _tekken_names(content.get("special_tokens"), version=config.get("version"))
    num_special = config.get("default_num_special_tokens", len(names))
    vocab_size = config.get("default_vocab_size", num_special + len(entries))
    if type(num_special) is not int or not len(names) <= num_special <= MAX_NUM_SPECIAL:
        raise GivenFileError(f"default_num_special_tokens must be {len(names)} to {MAX_NUM_SPECIAL}")
    if type(vocab_size) is not int or not num_special <= vocab_size <= num_special + len(entries):
        raise GivenFileError(f"default_vocab_size must be {num_special} to {num_special + len(entries)}")
    names += [f"<SPECIAL_{token_id}>" for token_id in range(len(names), num_special)]
    tokens = _by_rank(map(_tekken_entry, entries[: vocab_size - num_special]))
    special = _special_tokens(names, first_id=0)
    return RankedTokens(
        tokens, first_id=num_special, special=special, pattern=pattern, roles=TEKKEN_ROLES, adds_bos=True
    )


def _tekken_names(listed: Any, *, version: Any) -> list[str]:
    """Return the names of special tokens by id."""
    if listed is None:
        if version not in _VERSIONS_WITHOUT_NAMES:
            raise GivenFileError(f"it has no special_tokens, and its version is {version!r}")
        return list(TEKKEN_NAMES)
    try:
        names = {token["rank"]: token["token_str"] for token in listed}
    except (KeyError, TypeError) as error:
        raise GivenFileError("special_tokens has an entry without rank or token_str") from error
    if len(names) != len(listed) or names.keys() != set(range(len(names))):
        raise GivenFileError("special_tokens must have each rank from 0 on once")
    if not all(isinstance(name, str) for name in names.values()):
        raise GivenFileError("special_tokens has a token_str that is no text")
    return [names[rank] for rank in range(len(names))]


def _tekken_entry(entry: Any) -> tuple[bytes, int]:
    try:
        token, rank = b64decode(entry["token_bytes"], validate=True), entry["rank"]
    except (KeyError, TypeError, ValueError) as error:
        raise GivenFileError("vocab has an entry without a rank or without token_bytes in base64") from error
    if type(rank) is not int:
        raise GivenFileError("vocab has a rank that is no number")
    return token, rank


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
    uses a single merge per token: the last step from the token's bytes. Hence the ids equal tiktoken's.

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
