"""Traces for inspection: the origins of an answer's tokens, and the token tree of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truedraft.core.verdict import Origin
from truedraft.engine.batch import StepItem
from truedraft.server.service import Stream, StreamUpdate

_FORCED = "forced"
"""Name of the drafter of tokens that a grammar forces."""


def trace_of(stream: Stream, news: StreamUpdate, text_of: Callable[[int], str]) -> dict[str, Any]:
    """The tokens of `news` with their origins, and the trees of its steps.

    Args:
        stream: its counters of traced tokens are updated.
        news: each `StreamUpdate` of the stream once, in order.
    """
    steps = [_step(stream, each, text_of) for each in news.steps]
    tokens = []
    for piece in news.pieces:
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            forced = origin is Origin.ACCEPTED and stream.shown_tokens in stream.forced_tokens
            name = _FORCED if forced else origin.name.lower()
            tokens.append({"id": token, "text": text_of(token), "origin": name})
            stream.shown_tokens += 1
    return {"tokens": tokens, "steps": steps}


def _step(stream: Stream, item: StepItem, text_of: Callable[[int], str]) -> dict[str, Any]:
    """One step of one request: its tree's nodes in order, each after its parent; parent -1 is the text so far."""
    outcome = item.outcome
    assert outcome is not None
    tree = outcome.proposal.tree
    drafters: list[list[str]] = [[] for _ in range(len(tree))]
    for name, nodes in item.drafted.nodes.items():
        for node in nodes:
            if node < len(drafters):
                drafters[node].append(name)
    first = item.context + item.fed - stream.request.prompt_tokens  # index in the answer of the first emitted token
    stream.forced_tokens.update(first + i for i, node in enumerate(outcome.path) if drafters[node] == [_FORCED])
    return {
        "nodes": [
            {"text": text_of(token), "parent": parent, "drafters": own}
            for token, parent, own in zip(tree.host_ids, tree.shape.parents, drafters, strict=True)
        ],
        "accepted": list(outcome.path),
        "emitted": [text_of(token) for token in outcome.tokens],
        "prefill": item.prefill,
    }
