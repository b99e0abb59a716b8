"""Silence: transformers' own bars and warnings, which say nothing to a user of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and warnings off the user's screen while it loads or saves."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
