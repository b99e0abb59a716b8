"""Drafts that leave the form of a structured answer: left out of the forward, judged all the same, or the law is bent.

The form here is a table over a tiny vocabulary, so that the distribution of an answer can be written down: no two equal
tokens in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from support.chi_square import p_value
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.params import Structured
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.shaping import Path
from truedraft.core.tree import TokenTree
from truedraft.drafters import Drafter, DraftModel, DraftRequest, PromptLookup
from truedraft.engine import prompts
from truedraft.testing import MarkovModel

VOCAB, PROMPT, LENGTH = 4, [1, 2], 3


class NoTwins:
    """No token like the one before it; before an empty text there is token 0."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        self._tokens = tokens

    def masks(self, paths: Sequence[Path]) -> NDArray[np.bool_]:
        found = np.ones((len(paths), VOCAB), dtype=np.bool_)
        for row, path in enumerate(paths):
            found[row, (0, *self._tokens, *path)[-1]] = False
        return found

    def allows(self, path: Path, token: int) -> bool:
        return bool(self.masks([path])[0, token])

    def legal(self, path: Path) -> int:
        return next((place for place, token in enumerate(path) if not self.allows(path[:place], token)), len(path))

    def forced(self) -> Sequence[int]:
        return ()

    def recalls(self) -> bool:
        return False


@contextmanager
def table_forms(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests for a structured answer get the table in place of a grammar."""

    def form(params: SamplingParams, target: object, forms: object, tokens: list[int], owner: str) -> NoTwins | None:
        return NoTwins(tokens, len(tokens)) if params.structured is not None else None

    patch.setattr(prompts, "_form", form)
    yield


def law(target: MarkovModel) -> NDArray[np.float64]:
    """The distribution of the first three tokens, by definition."""
    found = np.zeros((VOCAB,) * LENGTH)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        text, probability = list(PROMPT), 1.0
        for token in tokens:
            probs = target.probs_after(text).numpy().copy()
            probs[text[-1]] = 0.0
            probability *= probs[token] / probs.sum()
            text.append(token)
        found[tokens] = probability
    return found


class Unmasked(Drafter):
    """Draws from a draft's own distribution, whatever the form says of it.

    Args:
        model: the draft.
        drops: whether draws outside the form are dropped, which bends the law.
    """

    name: ClassVar[str] = "unmasked"
    limits = Budget(2, 1, 2)

    def __init__(self, model: MarkovModel, *, drops: bool) -> None:
        self._model = model
        self._drops = drops

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset({DrawKind.INDEPENDENT})

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        return [
            self._chain(request, min(budget.depth, 2), own)
            for request, budget, own in zip(batch, budgets, noise, strict=True)
        ]

    def _chain(self, request: DraftRequest, depth: int, noise: Noise) -> Proposal:
        text, tokens, rows = list(request.tokens), [], []
        for place in range(depth):
            probs = self._model.probs_after(text)
            token = int((probs.cumsum(0) < noise.uniform(Purpose.DRAFT, place)).sum())
            if self._drops and token == text[-1]:
                break
            tokens.append(token)
            rows.append(probs)
            text.append(token)
        if not tokens:
            return Proposal.empty()
        draws = [(Draw(place, place, DrawKind.INDEPENDENT),) for place in range(len(tokens))]
        import torch

        return Proposal(TokenTree.chain(tokens), (*draws, ()), torch.stack(rows))


def counted(target: MarkovModel, drafter: Drafter, runs: int) -> NDArray[np.float64]:
    engine = Engine(target, drafter, controller="fixed", max_batch=60, entropy=0)
    counts = np.zeros((VOCAB,) * LENGTH)
    params = SamplingParams(LENGTH, 1.0, structured=Structured("json_object"))
    for _ in range(0, runs, 60):
        for answer in engine.generate([PROMPT] * 60, params):
            counts[tuple(answer.token_ids)] += 1
    return counts


@pytest.mark.parametrize("name", ["unmasked", "masked chain", "masked tree", "lookup"])
def test_answers_follow_the_masked_law_whatever_is_drafted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """False alarms: once in a million runs of each case."""
    target, draft = MarkovModel.random(VOCAB, seed=1), MarkovModel.random(VOCAB, seed=2)
    drafter = {
        "unmasked": Unmasked(draft, drops=False),
        "masked chain": DraftModel(draft, num_speculative_tokens=2),
        "masked tree": DraftModel(draft, branching=(2, 2)),
        "lookup": PromptLookup(min_ngram=1, max_ngram=1),
    }[name]
    with table_forms(monkeypatch):
        counts = counted(target, drafter, 3000)
    expected = law(target)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert p_value(counts[possible], expected[possible]) > 1e-6


def test_a_drafter_that_drops_draws_outside_the_form_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = MarkovModel.random(VOCAB, seed=3), MarkovModel.random(VOCAB, seed=4)
    with table_forms(monkeypatch):
        counts = counted(target, Unmasked(draft, drops=True), 6000)
    possible = law(target) > 0
    assert p_value(counts[possible], law(target)[possible]) < 1e-6


def test_what_leaves_the_form_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain whose second token is illegal: the forward sees the first alone, the verdict all."""
    target = MarkovModel.random(VOCAB, seed=1)
    rows: list[tuple[int, int]] = []
    engine = Engine(target, Unmasked(MarkovModel.random(VOCAB, seed=2), drops=False), controller="fixed", entropy=0)
    engine.listeners.append(
        lambda record: rows.extend((step.rows, step.nodes) for step in record.requests if not step.prefill)
    )
    with table_forms(monkeypatch):
        params = SamplingParams(12, 1.0, structured=Structured("json_object"))
        for _ in range(40):
            answer = engine.generate(PROMPT, params)
            text = [*PROMPT, *answer.token_ids]
            assert all(a != b for a, b in itertools.pairwise(text[1:]))
    assert any(fed < nodes + 1 for fed, nodes in rows) and any(fed == nodes + 1 == 3 for fed, nodes in rows)
    assert all(1 <= fed <= nodes + 1 for fed, nodes in rows)
