"""Models: the only place that touches transformers' models.

`base` is the contract that engine and drafters see; `huggingface` fulfils it for unmodified Hugging Face models.
"""

from truedraft.models.base import ForwardOutput, LanguageModel, Segment

__all__ = ["ForwardOutput", "LanguageModel", "Segment"]
