"""Between text and token ids: tokenizers, incremental detokenization, stop texts. The engine processes only ids."""

from truedraft.text.detokenizer import REPLACEMENT, StopScanner, StreamDetokenizer, TextStream
from truedraft.text.tokenizer import Tokenizer

__all__ = ["REPLACEMENT", "StopScanner", "StreamDetokenizer", "TextStream", "Tokenizer"]
