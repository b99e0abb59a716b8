"""Speculative beam search (Leviathan et al. 2211.17192, appendix A.4): several steps of beam search per forward. The
draft grows a tree by its own wider search; the target's steps are valid up to the first beam that is not in it, so the
beams are those of plain search, exactly as by transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core.tree import GrowingTree, chain_shape, shape_of
from truedraft.drafters.draft_model import DraftModel
from truedraft.engine.prompts import TextPrompt, encode_prompt
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel, Segment
from truedraft.options import check_whole

_NEVER = -1.0e9  # score of absent beams, as in transformers
_CHUNK = 512
_MOST_PENALTY = 5.0  # beyond it scores exceed the precision of transformers' arithmetic, which is followed here


@dataclass(frozen=True)
class Beam:
    """An answer; `score` is the log probability divided by the length to the power of the length penalty."""

    token_ids: tuple[int, ...]
    text: str | None
    score: float


@dataclass
class BeamAnswer:
    """The best beams first, and the steps of the search, for each of which plain beam search needs a target call."""

    beams: list[Beam] = field(default_factory=list)
    steps: int = 0
    target_calls: int = 0
    drafted: int = 0


class BeamSearch:
    """Beam search of one target, with or without a draft model.

    Args:
        draft: drafts the target's beams; None is plain beam search.
        draft_beams: of the draft, at least as many; None takes twice as many.
        num_speculative_tokens: steps that the draft looks ahead.
        length_penalty: power of the length by which scores are divided.
        early_stopping: True ends the search with `num_beams` finished beams; False once the best running one is worse
            than these at its length; "never" once it can no longer become better.

    Raises:
        OptionError: an option is out of its range.
        VocabularyMismatchError: the draft has other tokens than the target.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | None = None,
        *,
        num_beams: int = 4,
        draft_beams: int | None = None,
        num_speculative_tokens: int = 4,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        self.num_beams = check_whole("num_beams", num_beams, 1)
        self.draft_beams = check_whole("draft_beams", 2 * num_beams if draft_beams is None else draft_beams, num_beams)
        self.depth = check_whole("num_speculative_tokens", num_speculative_tokens, 1)
        if early_stopping not in (True, False, "never"):
            raise OptionError(f'must be True, False or "never", got {early_stopping!r}', field="early_stopping")
        if not abs(length_penalty) <= _MOST_PENALTY:
            message = f"must lie between -{_MOST_PENALTY} and {_MOST_PENALTY}, got {length_penalty!r}"
            raise OptionError(message, field="length_penalty")
        self.length_penalty, self.early_stopping = float(length_penalty), early_stopping
        self.target, self.draft = target, draft
        if draft is not None:
            DraftModel(draft).check(target)

    @torch.inference_mode()
    def generate(self, prompt: TextPrompt, max_tokens: int = 128) -> BeamAnswer:
        """The best beams after a prompt.

        Raises:
            PromptError: the prompt is empty, too long, or text without a tokenizer.
            OptionError: a negative length penalty makes all scores smaller than transformers' search can distinguish.
        """
        tokenizer = self.target.tokenizer
        ids = encode_prompt(self.target, prompt)
        most = min(check_whole("max_tokens", max_tokens, 1), self.target.most_tokens(ids) - len(ids))
        search = _Search(self.num_beams, self.target.eos_token_ids, most, self.length_penalty, self.early_stopping)
        answer = BeamAnswer()
        target = _Reader(self.target, ids)
        draft = None if self.draft is None else _Reader(self.draft, ids)
        try:
            while not search.over:
                self._round(search, target, draft, answer)
        finally:
            for reader in (target, draft):
                if reader is not None:
                    reader.release()
        found = search.found()
        if not found:
            raise OptionError(
                f"makes scores of {search.length} tokens smaller than beam search can hold, got "
                f"{self.length_penalty:g}; use one nearer to 1",
                field="length_penalty",
            )
        for tokens, score in found:
            text = None if tokenizer is None else tokenizer.decode(tokens)
            answer.beams.append(Beam(tokens, text, score))
        answer.steps = search.length
        return answer

    def _round(self, search: _Search, target: _Reader, draft: _Reader | None, answer: BeamAnswer) -> None:
        common = _common(search.running)
        for reader in (target, draft):
            if reader is not None:
                reader.continues(common)
        tree = GrowingTree()
        nodes = [tree.add(beam[len(common) :]) for beam in search.running]
        own = len(tree.tokens)
        ahead = min(self.depth, search.most - search.length - 1)
        if draft is not None and (ahead := min(ahead, draft.room(search.running))) > 0:
            self._draft(search, draft, tree, nodes, ahead)
        logits = target.read(tree, 0, range(-1, len(tree.tokens)))  # [1 + nodes, vocab]
        answer.target_calls += 1
        answer.drafted += len(tree.tokens) - own
        while True:
            search.step(logits[[node + 1 for node in nodes]].float())
            if search.over:
                return
            children = [
                tree.children.get((nodes[parent], beam[-1]))
                for parent, beam in zip(search.parents, search.running, strict=True)
            ]
            if None in children:
                return
            nodes = [child for child in children if child is not None]

    def _draft(self, search: _Search, draft: _Reader, tree: GrowingTree, nodes: Sequence[int], ahead: int) -> None:
        scores = search.scores[0, : len(nodes)]
        open_nodes = list(nodes)
        if not search.length:  # all beams are one at first
            open_nodes, scores = open_nodes[:1], scores[:1]
        fed = 0
        for level in range(ahead):
            rows = draft.read(tree, fed, open_nodes)  # [open nodes, vocab]
            fed = len(tree.tokens)
            likely = torch.log_softmax(rows.float(), dim=-1) + scores[:, None].to(rows.device)
            if search.ends.numel():
                likely[:, search.ends] = -torch.inf
            best = likely.flatten().topk(min(self.draft_beams, likely.numel()))
            vocab = likely.shape[1]
            kept = [place for place, score in enumerate(best.values.tolist()) if score > _NEVER]
            found = best.indices[kept].tolist()
            scores = best.values[kept]
            open_nodes = [tree.add((each % vocab,), open_nodes[each // vocab]) for each in found]
            if not open_nodes or level == ahead - 1:
                return


def _common(beams: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    first, last = min(beams), max(beams)
    length = next((place for place, pair in enumerate(zip(first, last, strict=True)) if pair[0] != pair[1]), len(first))
    return first[:length]


class _Reader:
    def __init__(self, model: LanguageModel, prompt: Sequence[int]) -> None:
        self._model = model
        self._prompt = len(prompt)
        self._text = list(prompt)
        self._cache = model.new_cache()
        self._tree = GrowingTree()
        self._chain = 0  # uncommitted tokens of the text, before those of the tree

    def continues(self, common: Sequence[int]) -> None:
        """Commit the new common prefix except its last token, as far as it was read, and drop the tree."""
        path = list(range(self._chain))
        node: int | None = -1
        for token in common[len(self._text) - self._prompt :]:
            node = self._tree.children.get((node, token)) if node is not None else None
            self._text.append(token)
            if node is not None and self._chain + node < self._cache.uncommitted:
                path.append(self._chain + node)
        self._cache.commit(path[: len(self._text) - 1 - self._cache.length])
        self._tree, self._chain = GrowingTree(), 0

    def room(self, beams: Sequence[tuple[int, ...]]) -> int:
        prompt = self._text[: self._prompt]
        return min(self._model.most_drafted([*prompt, *beam]) for beam in beams)

    def read(self, tree: GrowingTree, fed: int, nodes: Sequence[int]) -> Tensor:
        """Logits `[nodes, vocab]` after nodes of a tree, of which earlier calls read the first `fed`; with two tokens
        of the text not read yet, the tree (-1, -1, 0) is read as (-1, 0, 1, 1, 2).
        """
        if not fed:
            self._read_prompt()
            self._chain = len(self._text) - self._cache.length
        self._tree = tree
        ids = [*(() if fed else self._text[self._cache.length :]), *tree.tokens[fed:]]
        parents = [*range(-1, self._chain - 1), *(parent + self._chain for parent in tree.parents)]
        written = self._chain + fed if fed else 0
        rows = sorted({node + self._chain - written for node in nodes})
        prompt = 0 if fed else max(0, min(self._chain, self._prompt - 1 - self._cache.length))
        segment = Segment(
            self._cache, torch.tensor(ids), shape_of(tuple(parents)), rows, written, prompt=prompt
        )  # fmt: skip
        logits = self._model.forward([segment]).logits
        place = {row: number for number, row in enumerate(rows)}
        return logits[[place[node + self._chain - written] for node in nodes]]

    def _read_prompt(self) -> None:
        while len(self._text) - self._cache.length > _CHUNK:
            ids = self._text[self._cache.length :][:_CHUNK]
            prompt = max(0, min(len(ids), self._prompt - 1 - self._cache.length))
            self._model.forward([Segment(self._cache, torch.tensor(ids), chain_shape(len(ids)), (), prompt=prompt)])
            self._cache.commit(range(len(ids)))

    def release(self) -> None:
        self._model.release_cache(self._cache)


class _Search:
    def __init__(
        self, width: int, ends: Sequence[int], most: int, length_penalty: float, early_stopping: bool | str
    ) -> None:
        self.width, self.most = width, most
        self.ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._penalty, self._early = length_penalty, early_stopping
        self.running: list[tuple[int, ...]] = [()] * width
        self.scores = torch.full((1, width), _NEVER)
        self.scores[:, 0] = 0.0  # at first all beams are one
        self.parents = list(range(width))
        self.length = 0
        self.over = False
        self._ended: list[tuple[int, ...]] = [()] * width
        self._ended_scores = torch.full((1, width), _NEVER)
        self._is_ended = torch.zeros(1, width, dtype=torch.bool)
        self._improves = torch.ones(1, 1, dtype=torch.bool)

    def step(self, logits: Tensor) -> None:
        """Extend the beams by one token, by float32 logits `[beams, vocab]` after each running beam."""
        vocab = logits.shape[1]
        likely = (torch.log_softmax(logits.cpu(), dim=-1)[None] + self.scores[:, :, None]).reshape(1, -1)
        count = min(max(2, 1 + len(self.ends)) * self.width, likely.shape[1])
        scores, places = torch.topk(likely, k=count)
        tokens = places % vocab
        candidates = [
            (*self.running[place // vocab], token)
            for place, token in zip(places[0].tolist(), tokens[0].tolist(), strict=True)
        ]
        hits = torch.isin(tokens, self.ends)
        if self.length + 1 >= self.most:
            hits = torch.ones_like(hits)
        self._keep_ended(candidates, scores, hits)
        going = scores + hits.float() * _NEVER
        chosen = torch.topk(going, k=self.width)[1]
        self.scores = going.gather(1, chosen)
        self.running = [candidates[place] for place in chosen[0].tolist()]
        self.parents = (places.gather(1, chosen)[0] // vocab).tolist()
        self.length += 1
        self._look_ahead()
        full = bool(self._is_ended.all()) and self._early is True
        self.over = not bool(self._improves.any()) or full or bool(hits.all())

    def _keep_ended(self, candidates: Sequence[tuple[int, ...]], scores: Tensor, hits: Tensor) -> None:
        first = torch.arange(scores.shape[1])[None] < self.width
        ended = hits & first
        full = self._is_ended.all(dim=-1, keepdim=True) & (self._early is True)
        values = scores / ((self.length + 1) ** self._penalty)
        values = values + full.float() * _NEVER
        values = values + (~self._improves).float() * _NEVER
        values = values + (~ended).float() * _NEVER
        merged = torch.cat([self._ended_scores, values], dim=1)
        kept = torch.topk(merged, k=self.width)[1]
        everyone = [*self._ended, *candidates]
        self._ended = [everyone[place] for place in kept[0].tolist()]
        self._ended_scores = merged.gather(1, kept)
        self._is_ended = torch.cat([self._is_ended, ended], dim=1).gather(1, kept)

    def _look_ahead(self) -> None:
        farthest = self.most if self._early == "never" and self._penalty > 0.0 else self.length
        best = self.scores[:, :1] / (farthest**self._penalty)
        worst = torch.where(self._is_ended, self._ended_scores.min(dim=1, keepdim=True)[0], _NEVER)
        self._improves = self._improves & (best > worst).any(dim=-1, keepdim=True)

    def found(self) -> list[tuple[tuple[int, ...], float]]:
        pairs = zip(self._ended, self._ended_scores[0].tolist(), strict=True)
        return [(tokens, score) for tokens, score in pairs if score > 0.5 * _NEVER]
