"""A draft with another tokenizer that reads and writes its own tokens: its text is encoded again for the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise, Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.held import Held
from truedraft.errors import VocabularyMismatchError
from truedraft.models.base import LanguageModel
from truedraft.models.translated import translation_between
from truedraft.text.translation import Encoding, FollowedText, whole_characters

_GREEDY = SamplingParams()
_MOST_PER_TOKEN = 4  # draft ids per target id that its cache has room for


class ReencodedDraft(Drafter):
    """Drafts the likeliest text of a model with another tokenizer.

    The text is encoded with the draft's tokenizer, the draft writes a few tokens, and these are encoded with the
    target's tokenizer. The result is deterministic, so verification is exact. `TranslatedModel` instead draws token by
    token from the vocabulary that both models share.

    Args:
        num_speculative_tokens: number of the draft's own tokens per step.

    Raises:
        VocabularyMismatchError: one of them has no tokenizer, or they share almost nothing.
        CompositionError: the draft is an encoder-decoder.
        OptionError: an option is out of range.
    """

    name = "reencoded"
    observes_lazily = True

    def __init__(self, model: LanguageModel, target: LanguageModel, num_speculative_tokens: int = 4) -> None:
        self._translation = translation_between(model, target)
        assert model.tokenizer is not None
        assert target.tokenizer is not None
        self._inner = DraftModel(model, num_speculative_tokens)
        self.limits = self._inner.limits
        self.model: LanguageModel = model
        self._written = Encoding(target.tokenizer, target.vocab_size, fallback=0)
        self._read = Encoding(model.tokenizer, model.vocab_size, fallback=(*model.eos_token_ids, 0)[0])
        pairs = (
            pair
            for mine, theirs in self._translation.rounds
            for pair in zip(mine.tolist(), theirs.tolist(), strict=True)
        )
        self._meaning = {own: meant for own, meant in pairs if self._read.surfaces[own] is None}
        self._texts: dict[int, FollowedText] = {}
        self._inside: dict[int, DraftRequest] = {}  # requests in the draft's tokens
        models = [replace(each, per_token=_MOST_PER_TOKEN) for each in self._inner.held.models]
        self.held = Held(models, [self._texts])
        self._vocabulary = target.tokenizer.fingerprint

    def check(self, target: LanguageModel) -> None:
        """Raise `VocabularyMismatchError` for a target with another tokenizer than its own."""
        if target.tokenizer is None or target.tokenizer.fingerprint != self._vocabulary:
            raise VocabularyMismatchError(
                f"this draft was made for another tokenizer than that of {target.name!r}; make it with this target"
            )

    def begin(self, request: DraftRequest) -> None:
        text = self._texts[request.id] = FollowedText(self._written, self._read, self._translation)
        inside = DraftRequest(request.id, _GREEDY, TokenView(text.ids), scope=request.scope)
        self._inside[request.id] = inside
        self._inner.begin(inside)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        drafting: list[int] = []
        for place, (request, budget) in enumerate(zip(batch, budgets, strict=True)):
            if not budget.is_zero:
                self._read_on(request)
                if self._texts[request.id].ids:
                    drafting.append(place)
        within = [Budget(budgets[place].depth, 1, budgets[place].depth) for place in drafting]
        inside = [self._inside[batch[place].id] for place in drafting]
        quiet = [KeyedNoise(0, len(each.tokens), 0) for each in inside]
        proposals = [Proposal.empty() for _ in batch]
        drafted = self._inner.propose(inside, within, quiet) if inside else []
        for place, own in zip(drafting, drafted, strict=True):
            self._inner.caches[batch[place].id].commit(())
            tokens = self._encoded(self._texts[batch[place].id], own.tree.host_ids)
            budget = budgets[place]
            if tokens:
                chain = TokenTree.chain(tokens[: min(budget.depth, budget.nodes)])
                proposals[place] = Proposal.deterministic(chain)
        return proposals

    def _read_on(self, request: DraftRequest) -> None:
        text, cache = self._texts[request.id], self._inner.caches[request.id]
        before = text.ids[: cache.length]
        text.take(request.tokens)
        agree = next(
            (place for place, (old, new) in enumerate(zip(before, text.ids, strict=False)) if old != new),
            min(len(before), len(text.ids)),
        )
        if agree < cache.length:
            cache.rollback(agree)

    def _encoded(self, text: FollowedText, own: Sequence[int]) -> list[int]:
        """In the target's ids; must begin with the rest of an incomplete character."""
        written, silent = b"", None
        for number in own:
            surface = self._read.surfaces[number]
            if surface is None:
                silent = self._meaning.get(number)
                break
            written += surface
        if self._read.pads and not text.known:
            written = written.removeprefix(b" ")
        written, half = whole_characters(written), text.half
        if not written.startswith(half):
            return []
        tokens = self._written.ids_after(text.known, written[len(half) :])
        return tokens if silent is None else [*tokens, silent]

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None: ...
    def end(self, request: DraftRequest) -> None:
        self._texts.pop(request.id, None)
        inside = self._inside.pop(request.id, None)
        if inside is not None:
            self._inner.end(inside)
