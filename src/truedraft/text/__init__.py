"""Between text and token ids: tokenizer, incremental detokenising, stop texts. The engine sees ids only."""

from truedraft.text.detokenizer import REPLACEMENT, StreamDetokenizer
from truedraft.text.stopping import StopScanner, TextStream
from truedraft.text.tokenizer import Tokenizer

__all__ = ["REPLACEMENT", "StopScanner", "StreamDetokenizer", "TextStream", "Tokenizer"]
