"""Small tokenizers of the kinds that language models have."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEXT = "the cat sat on the mat, 42 naïve cafés; 漢字 🙂 Ünïcödé\n\tno!"


def byte_level() -> Tokenizer:
    """GPT-2's kind: bytes as characters, with some merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("a", "t"), ("Ã", "©")]
    words = [*alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer)


def llama() -> Tokenizer:
    """Llama's kind: words begin with ``▁``, unknown characters fall back to bytes, a leading space is stripped."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *string.ascii_letters, "▁t", "he", "▁the", "at"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special(tokenizer)


def gemma() -> Tokenizer:
    """Gemma's kind: as Llama's, without a space before the text."""
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def mistral() -> Tokenizer:
    """Mistral's kind: as Llama's, with control tokens in conversations."""
    tokenizer = llama()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<s>", "</s>", "[INST]", "[/INST]"])
    return tokenizer


def word_level() -> Tokenizer:
    """One token per word; tokens are joined by spaces."""
    words = ["[UNK]", *sorted(set(TEXT.split()))]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_special(tokenizer)


def word_piece() -> Tokenizer:
    """BERT's kind: continuations of a word begin with ``##``."""
    pieces = [
        "[UNK]",
        *string.ascii_lowercase,
        *(f"##{letter}" for letter in string.ascii_lowercase),
        ",",
        ".",
        "the",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_special(tokenizer)


def metaspace() -> Tokenizer:
    """T5's kind: a unigram model over ``▁`` words."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((letter, -3.0) for letter in string.ascii_letters),
        ("▁the", -1.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_special(tokenizer)


KINDS = {
    "byte level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "mistral": mistral,
    "word level": word_level,
    "word piece": word_piece,
    "metaspace": metaspace,
}


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<plain>", special=False)])
    return tokenizer
