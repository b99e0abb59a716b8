"""The forward of Llama-like decoders in C, compiled once on the user's machine where that is possible."""

from truedraft.models.native.body import NativeBody

__all__ = ["NativeBody"]
