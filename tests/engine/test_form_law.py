"""Drafts that leave the form of a structured answer: left out of the forward, judged all the same, or the law is bent.

The form here is a table over a tiny vocabulary, so that the distribution of an answer can be written down: no two equal
tokens in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.answers import fixed
from support.laws import Law, law_of, p_value_of_answers
from truedraft import SamplingParams
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


def law(target: MarkovModel) -> Law:
    def probs_after(answer: tuple[int, ...]) -> list[float]:
        probs = target.probs_after([*PROMPT, *answer]).clone()
        probs[(*PROMPT, *answer)[-1]] = 0.0
        return (probs / probs.sum()).tolist()  # type: ignore[no-any-return]

    return law_of(probs_after, LENGTH)


class Unmasked(Drafter):
    """Draws from a draft's own distribution, whatever the form says of it; or drops draws outside the form, which bends
    the law."""

    name: ClassVar[str] = "unmasked"
    limits = Budget(2, 1, 2)

    def __init__(self, model: MarkovModel, *, drops: bool) -> None:
        self._model = model
        self._drops = drops

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset({DrawKind.INDEPENDENT})

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        each = zip(batch, budgets, noise, strict=True)
        return [self._chain(request, min(budget.depth, 2), own) for request, budget, own in each]

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
        return Proposal(TokenTree.chain(tokens), (*draws, ()), torch.stack(rows))


def found(target: MarkovModel, drafter: Drafter, answers: int) -> float:
    engine = fixed(target, drafter, max_batch=64, entropy=0)
    params = SamplingParams(LENGTH, 1.0, structured=Structured("json_object"))
    return p_value_of_answers(engine, PROMPT, params, law(target), answers)


DRAFTERS: dict[str, Callable[[MarkovModel], Drafter]] = {
    "unmasked": lambda draft: Unmasked(draft, drops=False),
    "masked chain": lambda draft: DraftModel(draft, num_speculative_tokens=2),
    "masked tree": lambda draft: DraftModel(draft, branching=(2, 2)),
    "lookup": lambda draft: PromptLookup(min_ngram=1, max_ngram=1),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_follow_the_masked_law_whatever_is_drafted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """False alarms: once in a million runs of each case."""
    with table_forms(monkeypatch):
        drafter = DRAFTERS[name](MarkovModel.random(VOCAB, seed=2))
        assert found(MarkovModel.random(VOCAB, seed=1), drafter, 3000) > 1e-6


def test_a_drafter_that_drops_draws_outside_the_form_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with table_forms(monkeypatch):
        drafter = Unmasked(MarkovModel.random(VOCAB, seed=4), drops=True)
        assert found(MarkovModel.random(VOCAB, seed=3), drafter, 6000) < 1e-6


def test_what_leaves_the_form_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain whose second token is illegal: the forward sees the first alone, the verdict all."""
    target = MarkovModel.random(VOCAB, seed=1)
    rows: list[tuple[int, int]] = []
    engine = fixed(target, Unmasked(MarkovModel.random(VOCAB, seed=2), drops=False), entropy=0)
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
