"""Tiny tokenizers of the three kinds that matter, built on the spot, and one real one where the data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n",
    "naïve café — Übung 日本語",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOK512 = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "stories260K" / "tok512.model"


def byte_level_backend(lines: list[str] = LINES, vocab_size: int = 320) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<é>", special=False)])
    return backend


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(**options), eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


def llama_like(vocab: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """As transformers converts a Llama 2 SentencePiece model."""
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def small_llama() -> PreTrainedTokenizerFast:
    singles = ["▁", *"abcdefghijklmnopqrstuvwxyz.é日", "\ufffd"]
    merged = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("e", "n"), ("en", "d"), ("▁", "▁")]
    words = ["<unk>", "<s>", "</s>", *BYTES, *singles, *("".join(pair) for pair in merged)]
    return llama_like({word: number for number, word in enumerate(words)}, merged)


def metaspace() -> PreTrainedTokenizerFast:
    """As T5's: Unigram, a word mark instead of spaces, no bytes."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("▁the", -2.0), ("▁qu", -2.5), ("ick", -2.5), ("\ufffd", -9.0)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyzé"]
    return PreTrainedTokenizerFast(tokenizer_object=unigram(pieces), unk_token="<unk>")


def unigram(pieces: list[tuple[str, float]]) -> Backend:
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def stories_tokenizer() -> PreTrainedTokenizerFast:
    from transformers.utils.sentencepiece_model_pb2_new import ModelProto

    scores = {each.piece: each.score for each in ModelProto.FromString(TOK512.read_bytes()).pieces}
    vocab = {piece: number for number, piece in enumerate(scores)}
    merges = [
        (-scores[piece], vocab[piece[:cut]], (piece[:cut], piece[cut:]))
        for piece in scores
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab and not piece.startswith("<")
    ]
    return llama_like(vocab, [pair for _, _, pair in sorted(merges)])


BUILDERS = {"byte-level": byte_level, "llama": small_llama, "metaspace": metaspace}


ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("the", "quick", "fox", "end")
PAIRS = ("er", "in", "he", "ou", "ar", "st", "re", "on", "nd", "at", "es", "it")


def wide_byte_level() -> PreTrainedTokenizerFast:
    """Byte-level, without a sign for the beginning: letters, with and without a space before them, and some pairs."""
    space = "Ġ"
    merges = [(space, letter) for letter in ALPHABET] + [("t", "h"), ("c", "k"), ("q", "u"), *map(tuple, PAIRS)]
    merges += [(f"{space}t", "he"), (f"{space}f", "o"), (f"{space}fo", "x")]
    words = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def wide_sentencepiece() -> PreTrainedTokenizerFast:
    """A word mark instead of spaces, a sign for the beginning, no bytes."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -6.0)]
    pieces += [(letter, -5.0) for letter in ALPHABET] + [(f"▁{letter}", -5.5) for letter in ALPHABET]
    pieces += [(f"▁{word}", -7.0) for word in WORDS[:3]] + [(pair, -6.0) for pair in PAIRS]
    backend = unigram(pieces)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wide_word_pieces() -> PreTrainedTokenizerFast:
    """Word pieces, as BERT's: signs for beginning and end of every text."""
    words = ["[UNK]", "[CLS]", "[SEP]", *WORDS, *ALPHABET, *(f"##{letter}" for letter in ALPHABET)]
    words += [f"##{pair}" for pair in PAIRS] + ["##ck", "qu"]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


WIDE = {"byte-level": wide_byte_level, "sentencepiece": wide_sentencepiece, "word pieces": wide_word_pieces}
"""Of which any two share more than enough tokens, and none has all of another's."""
