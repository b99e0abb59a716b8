"""What runs a packed forward: the model's own modules, or a faster loop over the same weights."""

from truedraft.models.backends.base import Backend, BackendMaker

__all__ = ["Backend", "BackendMaker"]
