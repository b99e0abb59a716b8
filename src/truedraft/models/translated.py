"""A draft model with another tokenizer than the target's, which reads and writes the target's ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.tree import TreeShape, shape_of
from truedraft.errors import CompositionError, ModelError, VocabularyMismatchError
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.cache import FamilyState, RequestCache
from truedraft.text.translation import Translation


class TranslatedModel(LanguageModel):
    """Presents a draft in the vocabulary of a target with another tokenizer; `translation` is between the two.

    The target's tokens are spelled in one or several of the draft's ids. The draft's distribution is that of the shared
    ids, renormalised: an ordinary distribution over the target's ids, so samples from it are verified exactly. Raises
    what `translation_between` does.
    """

    def __init__(self, draft: LanguageModel, target: LanguageModel) -> None:
        self._draft = draft
        self.translation = translation_between(draft, target)
        # Drafted tokens have one id each, so they need no transfer from the device to be spelled.
        self._single = torch.tensor([ids[0] for ids in self.translation.reads], device=draft.device)
        self.name = draft.name
        self.tokenizer = target.tokenizer
        self.vocab_size = target.vocab_size
        self.context_length = draft.context_length
        self.eos_token_ids = target.eos_token_ids
        self.device = draft.device
        self.dtype, self.kv_dtype = draft.dtype, draft.kv_dtype
        self.fast_paths = draft.fast_paths
        self.pool = draft.pool
        self.parameters = draft.parameters
        self.weight_bytes = draft.weight_bytes
        self.head_width = draft.head_width
        self.shared_ids = self.translation.rounds[0][1]

    @property
    def note(self) -> str:  # type: ignore[override]
        coverage = f"{self.translation.shared:.0%} of the target's tokens can be drafted: the tokenizers differ"
        return "; ".join(each for each in (self._draft.note, coverage) if each)

    @property
    def warmups(self) -> int:  # type: ignore[override]
        return self._draft.warmups

    @property
    def fingerprint(self) -> str:
        return self._draft.fingerprint

    def most_tokens(self, tokens: Sequence[int]) -> int:
        """Largest length of a request with these first tokens, if all others are drafted (one id each)."""
        if not tokens:
            return self.context_length - len(self.translation.begin)
        reads = self.translation.reads
        spelled = len(self._at_the_beginning(reads[tokens[0]])) + sum(len(reads[token]) for token in tokens[1:])
        return len(tokens) + self.context_length - spelled

    def new_cache(self) -> RequestCache:
        return _SpelledCache(self._draft.new_cache())

    def release_cache(self, cache: RequestCache) -> None:
        assert isinstance(cache, _SpelledCache)
        self._draft.release_cache(cache.spelled)

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        spelled = [self._spelled(segment) for segment in segments]
        longest = max(segment.cache.length + segment.shape.depth for segment in spelled)
        if longest > self.context_length:
            raise ModelError(
                f"{self.name!r} reads at most {self.context_length} tokens of its own, and this text has {longest} of "
                "them"
            )
        output = self._draft.forward(spelled)
        return ForwardOutput(self.translation.logits(output.logits), output.hidden)

    def _spelled(self, segment: Segment) -> Segment:
        cache = segment.cache
        assert isinstance(cache, _SpelledCache)
        if transfers.waits(segment.tokens.device):
            words: list[tuple[int, ...]] = [(-1,)] * len(segment.tokens)
            tokens = self._single[segment.tokens]
        else:
            words = [self.translation.reads[token] for token in segment.tokens.tolist()]
            if cache.length == segment.written == 0:
                words[0] = self._at_the_beginning(words[0])
            tokens = torch.tensor([own for word in words for own in word])
        shape, rows, written = cache.spell(segment, words)
        return Segment(cache.spelled, tokens, shape, rows, written, sum(map(len, words[: segment.prompt])))

    def _at_the_beginning(self, word: tuple[int, ...]) -> tuple[int, ...]:
        begin = self.translation.begin
        return word if not begin or word[: len(begin)] == begin else (*begin, *word)


def translation_between(draft: LanguageModel, target: LanguageModel) -> Translation:
    """The translation between the ids of a target and those of a draft with another tokenizer.

    Raises VocabularyMismatchError: one has no tokenizer, or they share next to nothing; CompositionError: the draft is
    an encoder-decoder.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        without = draft if draft.tokenizer is None else target
        raise VocabularyMismatchError(
            f"{without.name!r} comes without a tokenizer, so its ids cannot be compared with those of the other model, "
            "and no text can pass between them; put its tokenizer files into its folder"
        )
    if draft.sources is not None:
        raise CompositionError(
            f"draft {draft.name!r} is an encoder-decoder with another tokenizer than the target's; it cannot "
            "distinguish texts from sources; use one with the target's tokenizer, or prompt-lookup"
        )
    sizes, ends = (target.vocab_size, draft.vocab_size), (target.eos_token_ids, draft.eos_token_ids)
    return Translation.between(target.tokenizer, draft.tokenizer, sizes, ends)


class _SpelledCache(RequestCache):
    """A cache indexed by the target's tokens; `spelled` is the draft's own, with one or several ids for each."""

    def __init__(self, spelled: RequestCache) -> None:
        # Like a model that carries states: its positions are not the target's, so prefixes are not shared by position.
        super().__init__(spelled.limit, FamilyState(carries=True), spelled.storage)
        self.spelled = spelled
        self._lengths = [0]  # of the spelled cache after each committed token
        self._ends: list[int] = []  # for each uncommitted token, the index of its last id among the uncommitted ones
        self._parents: list[int] = []  # of the uncommitted ids

    def spell(self, segment: Segment, words: Sequence[Sequence[int]]) -> tuple[TreeShape, list[int], int]:
        """The shape of all uncommitted ids, the rows of new ones that need logits, and how many earlier forwards wrote.

        Worked example: of the tree (-1, 0, 0) with tokens spelled in 1, 2 and 1 ids the ids are the tree
        (-1, 0, 1, 0), and the rows of tokens 1 and 2 are those of ids 2 and 3.
        """
        self._ends = self._ends[: segment.written]
        written = self._ends[-1] + 1 if self._ends else 0
        parents = self._parents[:written]
        for node, word in enumerate(words, segment.written):
            above = segment.shape.parents[node]
            parent = self._ends[above] if above >= 0 else -1
            for _ in word:
                parents.append(parent)
                parent = len(parents) - 1
            self._ends.append(parent)
        self._parents = parents
        self.uncommitted = len(self._ends)
        rows = [self._ends[segment.written + row] - written for row in segment.rows]
        return shape_of(tuple(parents)), rows, written

    def commit(self, path: Sequence[int]) -> None:
        kept: list[int] = []
        for node in path:
            first = self._ends[node - 1] + 1 if node else 0
            kept.extend(range(first, self._ends[node] + 1))
            self._lengths.append(self.spelled.length + len(kept))
        self.spelled.commit(kept)
        self.length += len(path)
        self._forget_uncommitted()

    def rollback(self, length: int) -> None:
        self._forget_uncommitted()
        self.spelled.rollback(self._lengths[length])
        while self.spelled.length != self._lengths[length]:  # states of layers were rolled back further
            length = bisect_right(self._lengths, self.spelled.length) - 1
            self.spelled.rollback(self._lengths[length])
        del self._lengths[length + 1 :]
        self.length = length

    def _forget_uncommitted(self) -> None:
        self._ends, self._parents, self.uncommitted = [], [], 0

    @property
    def n_bytes(self) -> int:
        return self.spelled.n_bytes

    @property
    def most(self) -> int:
        return self.spelled.most

    def limit_to(self, limit: int) -> None:
        self.spelled.limit_to(limit)

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        return self.spelled.entries()
