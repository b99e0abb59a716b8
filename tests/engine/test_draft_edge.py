"""A draft with learned positions and a shorter context than the target drafts to its edge; plain decoding goes on."""

from __future__ import annotations

from functools import cache

import pytest

from support.answers import fixed
from support.tiny_models import PROMPTS, build, gpt2, packed
from truedraft import Engine, SamplingParams
from truedraft.core.verdict import Origin
from truedraft.drafters import DraftModel
from truedraft.models.huggingface import HuggingFaceModel

EDGE = 24
LENGTHS = (1, EDGE - 5, EDGE - 1, EDGE, EDGE + 1, 37)
TEXT = [*PROMPTS[1], *PROMPTS[1]]
KINDS = {"greedy": {}, "seeded": {"temperature": 1.0, "seed": 3}, "sampled": {"temperature": 1.0}}


class Noting(DraftModel):
    """Keeps how far into the text its proposals reached."""

    reached = 0

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        proposals = super().propose(batch, budgets, noise)
        for request, proposal in zip(batch, proposals, strict=True):
            if len(proposal.tree):
                self.reached = max(self.reached, len(request.tokens) + proposal.tree.shape.depth)
        return proposals


@cache
def draft() -> HuggingFaceModel:
    config = gpt2()
    config.n_positions = EDGE
    return HuggingFaceModel(build(config, seed=1, spread=0.4), None, "short")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("branching", [(1,) * 5, (3, 2, 1), (1,)], ids=["chain", "tree", "one-token"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_goes_to_its_own_edge_and_the_answer_beyond(branching: tuple[int, ...], kind: str) -> None:
    target = packed("gpt2")
    drafter = Noting(draft(), branching=branching)
    prompts = [TEXT[:length] for length in LENGTHS]
    assert draft().context_length == EDGE < target.context_length
    params = SamplingParams(max_tokens=30, **KINDS[kind])  # type: ignore[arg-type]
    answers = fixed(target, drafter).generate(prompts, params)
    # The last token it can say anything of stands right behind its last position.
    assert drafter.reached == EDGE + 1
    for length, answer in zip(LENGTHS, answers, strict=True):
        assert (len(answer.token_ids), answer.warnings) == (30, ())
        assert (answer.stats.draft_tokens > 0) == (length < EDGE)
        beyond = answer.origins[max(1, EDGE + 1 - length) :]
        assert set(beyond) == {Origin.BONUS}, "nothing was drafted there"
    if kind != "sampled":
        plain = Engine(target).generate(prompts, params)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
