"""The tokenizers of the base and of the chat variant. One token per byte lets a small model learn a word's letters."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peraxis.demo.tasks import Item

# The models' context length.
MAX_TOKENS = 512
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
BASE_SPECIAL_TOKENS = (BOS, EOS, PAD)
# The chat variant adds these to the base's vocabulary.
CHAT_TOKENS = (USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def base_tokenizer() -> PreTrainedTokenizerFast:
    """Make the base's tokenizer: ids 0 to 255 are bytes, then come the special tokens. A text begins with BOS."""
    alphabet = bytes_to_unicode()
    words = [*(alphabet[byte] for byte in range(256)), *BASE_SPECIAL_TOKENS]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, words.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Make the chat variant's tokenizer: the base's with three added tokens, a chat template, and END as end token."""
    tokenizer = base_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_TOKENS)})
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, item: Item) -> list[int]:
    """Encode an item's prompt. The base lacks the chat tokens and reads their names as plain text."""
    if item.messages is None:
        return list(tokenizer(item.prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        item.messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
