"""Small tokenizers in the published form of every family: its pipeline, added tokens with their flags, and class.

The merges are learned from a few sentences. Everything else is as in the family's published files, so that transformers
selects the same class and rebuilds the same pipeline as it does for them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "\u2581"
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ONE_DIGIT = rf"{_ENGLISH}|{_WORDS}|\p{{N}}|{_REST}"
"""Split pattern of Qwen, Hunyuan and Ling: each digit is a word."""
THREE_DIGITS = rf"{_ENGLISH}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
"""Split pattern of GLM and Llama 3: up to three digits are a word."""
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Split pattern of gpt-oss and MiniMax: words by upper and lower case."""
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Split pattern of Mistral: words by case, each digit a word."""
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CORPUS = [
    "the cat sat on the mat, and the hello world said hello to the cat in 1234 and 2026.",
    "Der Tag beginnt für den Vogel; été à Paris, naïve façade.",
    "x = [1, 2, 3]\r\n\r\n    def f(a):\n\treturn a['b']  # don't\n",
    "日本語の文章、東京タワー。한국어 문장 한글. שלום עולם مرحبا بالعالم",
    '{"name": "get_weather", "arguments": {"city": "Wien", "days": 3}}',
]


@dataclass(frozen=True, kw_only=True)
class PublishedForm:
    """Published form of the tokenizers of some families."""

    families: tuple[str, ...]
    """Model types of transformers."""
    said: str
    """Description of the form on the page of families."""
    published: str = ""
    """The published tokenizer that `make published` tests in this form."""
    tokenizer_class: str
    special: Sequence[str]
    eos: str
    plain: Sequence[str] = ()
    bos: str | None = None
    normalizer: normalizers.Normalizer | None = None
    splits: Sequence[str] = ()
    digits: bool = False
    """True if each digit is split off by a pre-tokenizer of its own."""
    own_regex: bool = False
    """True if the byte-level step splits words by GPT-2's pattern."""
    falls_back: bool = False
    """True if characters without a token become byte tokens, and spaces U+2581."""
    adds_bos: bool = False
    ends: Sequence[str] = ()
    """Further tokens that end an answer, from `generation_config.json`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of `tokenizer_config.json`."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Further fields of `config.json`."""


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
FORMS = {
    "qwen": PublishedForm(
        families=("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "dots1"),
        said="byte-level, NFC",
        published="Qwen3's",
        tokenizer_class="Qwen2Tokenizer",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=(*_CALL, "<tool_response>", "</tool_response>", *_THINK),
        eos="<|im_end|>",
        ends=("<|endoftext|>",),
        normalizer=normalizers.NFC(),
        splits=(ONE_DIGIT,),
        config={"add_prefix_space": False, "add_bos_token": False, "pad_token": "<|endoftext|>"},
    ),
    "deepseek": PublishedForm(
        families=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear"),
        said="byte-level, three splits, adds its first token",
        published="DeepSeek-V3's, and Kimi-K2's `tiktoken.model`",
        tokenizer_class="LlamaTokenizerFast",
        special=(f"<{_BAR}begin{SPACE}of{SPACE}sentence{_BAR}>", f"<{_BAR}end{SPACE}of{SPACE}sentence{_BAR}>"),
        plain=(f"<{_BAR}User{_BAR}>", f"<{_BAR}Assistant{_BAR}>", f"<{_BAR}tool{SPACE}sep{_BAR}>", *_THINK),
        bos=f"<{_BAR}begin{SPACE}of{SPACE}sentence{_BAR}>",
        eos=f"<{_BAR}end{SPACE}of{SPACE}sentence{_BAR}>",
        normalizer=normalizers.Sequence([]),
        splits=DEEPSEEK,
        adds_bos=True,
        config={"add_bos_token": True, "add_eos_token": False, "legacy": True, "unk_token": None},
    ),
    "glm": PublishedForm(
        families=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        said="byte-level, markers that are not special",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        plain=("/nothink", *_THINK, *_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
        ends=("<|user|>",),
        splits=(THREE_DIGITS,),
        config={"pad_token": "<|endoftext|>", "do_lower_case": False, "remove_space": False, "padding_side": "left"},
    ),
    "gpt-oss": PublishedForm(
        families=("gpt_oss",),
        said="byte-level, words by case",
        published="gpt-oss'",
        tokenizer_class="PreTrainedTokenizerFast",
        special=(
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
        ),
        bos="<|startoftext|>",
        eos="<|return|>",
        splits=(CASED,),
        config={"pad_token": "<|endoftext|>"},
    ),
    "minimax": PublishedForm(
        families=("minimax_m2",),
        said="byte-level, words by case, markers that are not special",
        tokenizer_class="GPT2Tokenizer",
        special=("]!p~[", "]~!b[", "[e~[", "]~b]", "]!d~[", "<fim_prefix>"),
        plain=("<minimax:tool_call>", "</minimax:tool_call>", *_THINK),
        bos="]~!b[",
        eos="[e~[",
        splits=(CASED,),
        config={"unk_token": "]!d~[", "add_prefix_space": False},
    ),
    "mixtral": PublishedForm(
        families=("mixtral",),
        said="byte fallback, a space before the text, adds its first token",
        published="Llama 2's, of the same form",
        tokenizer_class="LlamaTokenizer",
        special=("<unk>", "<s>", "</s>"),
        bos="<s>",
        eos="</s>",
        normalizer=normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
        falls_back=True,
        adds_bos=True,
        config={"unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "legacy": True},
    ),
    "mistral": PublishedForm(
        families=("mistral4", "nemotron_h"),
        said="byte-level, words by case, adds its first token; or `tekken.json`",
        published="Mistral Nemo's, of the same form",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"),
        bos="<s>",
        eos="</s>",
        splits=(TEKKEN,),
        adds_bos=True,
        config={"unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": True, "add_prefix_space": False},
    ),
    "ernie": PublishedForm(
        families=("ernie4_5_moe",),
        said="byte fallback, no space before the text",
        published="Gemma 3's, of the same form",
        tokenizer_class="Ernie4_5_Tokenizer",
        special=("<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>", "<mask:1>"),
        plain=_THINK,
        bos="<s>",
        eos="</s>",
        normalizer=normalizers.Replace(" ", SPACE),
        falls_back=True,
        config={
            "unk_token": "<unk>",
            "cls_token": "<|begin_of_sentence|>",
            "sep_token": "<|end_of_sentence|>",
            "auto_map": {"AutoTokenizer": ["tokenization_ernie4_5.Ernie4_5_Tokenizer", None]},
        },
    ),
    "granite": PublishedForm(
        families=("granitemoe",),
        said="byte-level, single digits",
        tokenizer_class="GPT2Tokenizer",
        special=("<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        digits=True,
        own_regex=True,
        config={"unk_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>", "add_prefix_space": False},
    ),
    "hunyuan": PublishedForm(
        families=("hunyuan_v1_moe", "hy_v3"),
        said="byte-level, NFC; or `hy.tiktoken`",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>", "<|extra_4|>"),
        plain=(*_THINK, "<answer>", "</answer>"),
        bos="<|startoftext|>",
        eos="<|eos|>",
        normalizer=normalizers.NFC(),
        splits=(ONE_DIGIT,),
        config={"pad_token": "<|pad|>"},
    ),
    "olmoe": PublishedForm(
        families=("olmoe",),
        said="byte-level, NFC, runs of spaces as added tokens",
        tokenizer_class="GPTNeoXTokenizer",
        special=("|||IP_ADDRESS|||", "<|padding|>", "<|endoftext|>"),
        plain=(*(" " * count for count in range(24, 1, -1)), "|||EMAIL_ADDRESS|||"),
        eos="<|endoftext|>",
        normalizer=normalizers.NFC(),
        own_regex=True,
        config={"add_prefix_space": False, "pad_token": "<|padding|>", "add_bos_token": False, "add_eos_token": False},
    ),
    "solar": PublishedForm(
        families=("solar_open",),
        said="byte-level; its published files were not read",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|startoftext|>", "<|endoftext|>", "<|begin|>", "<|end|>"),
        plain=_THINK,
        bos="<|startoftext|>",
        eos="<|endoftext|>",
        ends=("<|end|>",),
        splits=(THREE_DIGITS,),
        config={"pad_token": "<|endoftext|>"},
    ),
    "trinity": PublishedForm(
        families=("afmoe",),
        said="byte-level, a form of their own; the published files were not read",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
        plain=(*_THINK, *_CALL),
        bos="<|begin_of_text|>",
        eos="<|im_end|>",
        splits=(THREE_DIGITS,),
        config={"pad_token": "<|end_of_text|>"},
    ),
    "laguna": PublishedForm(
        families=("laguna",),
        said="byte-level, a form of their own; the published files were not read",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|EOS|>", "<|PAD|>", "<assistant>", "</assistant>", "<user>", "</user>"),
        plain=(*_THINK, *_CALL),
        bos="<|EOS|>",
        eos="<|EOS|>",
        ends=("</assistant>",),
        splits=(THREE_DIGITS,),
        config={"pad_token": "<|PAD|>"},
    ),
    "gemma": PublishedForm(
        families=("gemma4_text",),
        said="byte fallback, no space before the text, adds its first token; no published file was read",
        published="Gemma 3's, of the same form",
        tokenizer_class="GemmaTokenizer",
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        plain=("<|tool_call>", "<tool_call|>", '<|"|>'),
        bos="<bos>",
        eos="<eos>",
        ends=("<turn|>",),
        normalizer=normalizers.Replace(" ", SPACE),
        falls_back=True,
        adds_bos=True,
        config={"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>", "add_bos_token": True},
    ),
    "ling": PublishedForm(
        families=("bailing_moe_v2", "bailing_hybrid"),
        said="byte-level",
        tokenizer_class="PreTrainedTokenizerFast",
        special=("<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<role>", "</role>", "<|role_end|>"),
        plain=(*_CALL, *_THINK),
        bos="<|startoftext|>",
        eos="<|endoftext|>",
        ends=("<|role_end|>",),
        splits=(ONE_DIGIT,),
        config={"pad_token": "<|endoftext|>", "add_bos_token": False, "add_eos_token": False, "fast_tokenizer": True},
        model_config={"auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"}},
    ),
}
FORMS["minimax_m3"] = replace(
    FORMS["minimax"],
    families=("minimax_m3_vl_text",),
    said="as MiniMax-M2's, with a class that keeps the file's pipeline; no published file was read",
    published="",
    tokenizer_class="PreTrainedTokenizerFast",
)
FORMS["mimo"] = replace(
    FORMS["qwen"], families=("mimo_v2_flash",), said="as Qwen's; no published file was read", published=""
)
FORMS["step"] = replace(
    FORMS["deepseek"],
    families=("step3p5",),
    said="as DeepSeek's, with markers of turns; no published file was read",
    published="",
    special=(*FORMS["deepseek"].special, "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
)
FORMS["granite-4"] = replace(
    FORMS["granite"],
    families=("granitemoehybrid",),
    said="byte-level, three digits; no published file was read",
    digits=False,
    own_regex=False,
    splits=(THREE_DIGITS,),
)
FORM_OF_FAMILY = {family: name for name, form in FORMS.items() for family in form.families}


TEMPLATE = "{{ bos_token or '' }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}"


def write_form(name: str, directory: Path, *, vocab_size: int = 512) -> None:
    """Write a form's `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    It has at most `vocab_size` ids; a family's further fields go into an existing `config.json`.
    """
    form = FORMS[name]
    tokenizer = Tokenizer(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True) if form.falls_back else models.BPE()
    )
    if form.normalizer is not None:
        tokenizer.normalizer = form.normalizer
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    if form.falls_back:
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        strips = [decoders.Strip(" ", 1, 0)] if name == "mixtral" else []
        tokenizer.decoder = decoders.Sequence([*steps, *strips])
        first, alphabet = [*form.special, *bytes_of], []
    else:
        tokenizer.pre_tokenizer = _byte_level(form)
        tokenizer.decoder = decoders.ByteLevel()
        first, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    num_added = len(form.plain) + (0 if form.falls_back else len(form.special))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_added,
        special_tokens=first,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if form.falls_back:
        tokenizer = _without_byte_specials(tokenizer, form)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in form.special])
    normalized = name == "olmoe"
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=normalized) for token in form.plain])
    if form.adds_bos and form.bos:
        bos = f"{form.bos}:0"
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A:0", pair=f"{bos} $A:0 {bos} $B:1", special_tokens=[(form.bos, tokenizer.token_to_id(form.bos))]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": form.bos, "eos_token": form.eos, "tokenizer_class": form.tokenizer_class}
    named = {
        "added_tokens_decoder": _added(tokenizer),
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    written = {**named, **special, **form.config}
    (directory / "tokenizer_config.json").write_text(json.dumps(written, ensure_ascii=False))
    if form.model_config:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | form.model_config))
    ends = [tokenizer.token_to_id(token) for token in (form.eos, *form.ends)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _byte_level(form: PublishedForm) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in form.splits]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if form.digits else []
    return pre_tokenizers.Sequence(
        [*splits, *digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=form.own_regex)]
    )


def _without_byte_specials(tokenizer: Tokenizer, form: PublishedForm) -> Tokenizer:
    """Return the tokenizer with byte tokens as plain entries; the trainer reserves ids only for special tokens."""
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in form.special]
    return Tokenizer.from_str(json.dumps(described))


def _added(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    added = json.loads(tokenizer.to_str())["added_tokens"]
    return {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added}
