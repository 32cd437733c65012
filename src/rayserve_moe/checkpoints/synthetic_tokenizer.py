"""The byte-level tokenizer and the chat template of synthetic checkpoints."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS_TOKEN, EOS_TOKEN, PAD_TOKEN = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SPECIAL_IDS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
MIN_VOCAB_SIZE = 3 + 256
# Prompt of turn n + answer + </s> is a prefix of the prompt of turn n + 1, as text and as ids.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}"
    "{% endif %}"
    "{{ message['role'] }}: {{ message['content'] or '' }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save the byte-level tokenizer for a model of `vocab_size` outputs: three special tokens, bytes, `<id_N>`.

    The `<id_N>` entries are never produced by encoding; they let every id that the model may sample decode to text.
    """
    vocabulary = {BOS_TOKEN: BOS_ID, EOS_TOKEN: EOS_ID, PAD_TOKEN: PAD_ID}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    for token_id in range(len(vocabulary), vocab_size):
        vocabulary[f"<id_{token_id}>"] = token_id
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
