"""For Ray: `serve run truedraft.deploy.ray:app model=...`, and `Predictor` for `map_batches` of ray.data."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from truedraft.cli.parameters import read_words
from truedraft.cli.serve import ServeOptions, replicas
from truedraft.server.cluster.predictor import Predictor

__all__ = ["Predictor", "app"]


def app(arguments: dict[str, Any]) -> Application:
    """The application, of the options of `truedraft serve` by name: `model=smollm2 max_batch=16 replicas=2`.

    `host` and `port` are Ray's to know; requests are answered by whatever host name they come to, unless
    `allowed_host` is given. Raises OptionError if an option is not known, or its value cannot be used.
    """
    return replicas(read_words(ServeOptions, {"host": "0.0.0.0", **arguments}))
