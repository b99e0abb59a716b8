"""The sets of tokens that are bet on: fixed at random, or fixed by what is known before the token is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.certify.recording import Decision

_RANDOM_SETS = 32
_RECENT = 16
_UNLIKELY = 0.02
_MOST_PLACES = 8


@dataclass(frozen=True, slots=True)
class Scored:
    """Emitted tokens of one request, with the target's laws at their own prefixes.

    Attributes:
        laws: `[tokens, vocab]`: by a plain forward over the text.
        tokens: the emitted ones.
        before: the prompt.
        decisions: what the drafter knew, for each token.
        place: the request's number in its batch.
        coupled: whether the drafter may have seen the noise that decides.
    """

    laws: Tensor
    tokens: Sequence[int]
    before: Sequence[int]
    decisions: Sequence[Decision]
    place: int
    coupled: bool


class Directions:
    """Sets of tokens for tests of a stream of emitted tokens.

    A set may depend on everything before its token (text, laws, what the drafter knew), never on the token. What a
    drafter *drew* is no such thing, its laws are, and deterministic candidates are. Under coupled noise a tree is cut
    by the very noise that decides its tokens, and with it how deep an accepted path may go: then neither is.

    Args:
        vocab: size of the vocabulary.
        batch: requests in a batch; each of the first 8 places is also tested by itself.
        seed: of the random sets.
    """

    def __init__(self, vocab: int, batch: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        members = torch.rand(_RANDOM_SETS, vocab, generator=generator).argsort(dim=-1) < vocab // 2
        self._members = members.T.float().contiguous()  # [vocab, sets]
        self._places = min(batch, _MOST_PLACES)
        self._general = [
            *(f"random half {number}" for number in range(_RANDOM_SETS)),
            "the likeliest token",
            "unlikely tokens",
            "later ids",
            "recent tokens",
            "the last token",
            "what the draft overrates",
            "the draft's first guess",
            "later ids of what the draft underrates",
        ]
        self._by_depth = ["the likeliest token", "unlikely tokens", "later ids", "the last token", "random half 0"]
        self._by_place = ["random half 0", "the likeliest token", "unlikely tokens"]

    @property
    def names(self) -> list[str]:
        """Of the tests."""
        deep = [
            f"{name}, {where}" for where in ("first of a step", "behind accepted tokens") for name in self._by_depth
        ]
        places = [f"{name}, place {place}" for place in range(self._places) for name in self._by_place]
        return [*self._general, *deep, *(places if self._places > 1 else [])]

    def measure(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """What the target's law gives to the sets, and whether each token lies in them.

        Returns:
            Chances `[tokens, tests]`, float64, -1 where a test is not about a token, and hits `[tokens, tests]`, bool.
        """
        laws = scored.laws
        tokens = torch.as_tensor(list(scored.tokens), device=laws.device)
        sets = [*self._fixed(laws, tokens), *self._of_laws(laws, tokens), *self._of_text(scored)]
        sets += self._of_draft(scored, tokens)
        chances = torch.stack([chance.double().cpu() for chance, _ in sets], dim=1)
        hits = torch.stack([hit.cpu() for _, hit in sets], dim=1)
        return self._with_strata(chances, hits, scored)

    def _fixed(self, laws: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        members = self._members.to(laws.device)
        chances, hits = laws.float() @ members, members[tokens] > 0.5
        return list(zip(chances.unbind(1), hits.unbind(1), strict=True))

    def _of_laws(self, laws: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        best, which = laws.max(dim=-1)
        own = laws.gather(-1, tokens[:, None])[:, 0]
        unlikely = (laws * (laws < _UNLIKELY)).sum(dim=-1)
        below = laws.double().cumsum(dim=-1)
        half = (below < 0.5).sum(dim=-1, keepdim=True).clamp_max(laws.shape[-1] - 1)  # id at which half is reached
        later = 1.0 - below.gather(-1, half)[:, 0]
        return [(best, tokens == which), (unlikely, own < _UNLIKELY), (later, tokens > half[:, 0])]

    def _of_text(self, scored: Scored) -> list[tuple[Tensor, Tensor]]:
        text = [*scored.before, *scored.tokens]
        first = len(scored.before)
        recent, last, hits = [], [], []
        for i, token in enumerate(scored.tokens):
            known = sorted(set(text[max(0, first + i - _RECENT) : first + i]))
            recent.append(scored.laws[i, known].sum())
            last.append(scored.laws[i, text[first + i - 1]])
            hits.append((token in known, token == text[first + i - 1]))
        seen = torch.tensor(hits).view(-1, 2)
        return [(torch.stack(recent), seen[:, 0]), (torch.stack(last), seen[:, 1])]

    def _of_draft(self, scored: Scored, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the draft gives more than the target, the likeliest of it, and a half of what it gives less."""
        chances = torch.full((3, len(tokens)), -1.0, dtype=torch.float64)
        hits = torch.zeros(3, len(tokens), dtype=torch.bool)
        for i, decision in enumerate(scored.decisions):
            q = self._draft_law(scored, i)
            if q is not None:
                law, token = scored.laws[i], int(scored.tokens[i])
                over = q > law
                first = decision.candidates[0] if decision.candidates else int(q.argmax())
                # A recovered token comes from what is left of the law, by a number that must not have judged before.
                left = (law - q).clamp_min_(0.0)
                before = left.cumsum(dim=-1) - left
                later = (2.0 * before >= left.sum()) & (law > q)
                for row, members in enumerate((over, later)):
                    chances[2 * row, i], hits[2 * row, i] = float((law * members).sum()), bool(members[token])
                chances[1, i], hits[1, i] = float(law[first]), token == first
        return list(zip(chances, hits, strict=True))

    def _draft_law(self, scored: Scored, place: int) -> Tensor | None:
        """The law of the draft at a token's node; of candidates, all of it on them."""
        decision, law = scored.decisions[place], scored.laws[place]
        if scored.coupled:
            return None
        if decision.q is not None:
            return decision.q.to(law)
        if not decision.candidates:
            return None
        chosen = torch.zeros_like(law)
        chosen[list(decision.candidates)] = 1.0
        return chosen

    def _with_strata(self, chances: Tensor, hits: Tensor, scored: Scored) -> tuple[Tensor, Tensor]:
        """The general tests, and some of them on a part of the tokens alone."""
        deep = torch.tensor([decision.depth > 0 for decision in scored.decisions])
        columns = {name: number for number, name in enumerate(self._general)}
        by_depth = [columns[name] for name in self._by_depth]
        by_place = [columns[name] for name in self._by_place]
        all_chances, all_hits = [chances], [hits]
        for part in (~deep, deep):
            here = part & (not scored.coupled)
            all_chances.append(chances[:, by_depth].masked_fill(~here[:, None], -1.0))
            all_hits.append(hits[:, by_depth])
        if self._places > 1:
            for place in range(self._places):
                stands = scored.place % self._places == place
                all_chances.append(chances[:, by_place] if stands else torch.full_like(chances[:, by_place], -1.0))
                all_hits.append(hits[:, by_place])
        return torch.cat(all_chances, dim=1), torch.cat(all_hits, dim=1)
