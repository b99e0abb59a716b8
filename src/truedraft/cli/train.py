"""`truedraft train`: what trains drafters."""

from __future__ import annotations

import typer

from truedraft.cli.failures import interrupted_in_json, telling
from truedraft.cli.train_draft import draft
from truedraft.cli.train_medusa import medusa
from truedraft.cli.train_redrafter import redrafter


def train_app() -> typer.Typer:
    """The commands that train drafters."""
    app = typer.Typer(name="train", help="Train a drafter for a target.")
    for command in (draft, medusa, redrafter):
        app.command()(telling(interrupted_in_json(command)))
    return app
