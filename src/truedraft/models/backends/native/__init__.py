"""The forward of Llama-like decoders in C, compiled once on the user's machine where that is possible."""

from truedraft.models.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
