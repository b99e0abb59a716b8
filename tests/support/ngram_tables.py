"""Tables of n-grams for tests: counted in texts that a Markov table wrote, and by the definition, slowly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from truedraft import Engine, SamplingParams
from truedraft.drafters.ngram.table import NgramTable
from truedraft.models.base import LanguageModel
from truedraft.training.ngrams import count_ngrams


def table_of(model: LanguageModel, order: int = 3, texts: int = 8, length: int = 40) -> NgramTable:
    """Counted in what a model writes at temperature 1 behind single tokens."""
    params = [SamplingParams(max_tokens=length, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(texts)]
    prompts = [[seed % model.vocab_size] for seed in range(texts)]
    answers = Engine(model).generate(prompts, params)
    written = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    return count_ngrams(written, model.vocab_size, order)


def random_texts(vocab: int, seed: int, count: int = 4, length: int = 60) -> list[list[int]]:
    """Texts whose tokens are far from equally likely."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(vocab, 0, -1).double() ** 2
    drawn = torch.multinomial(weights, count * length, replacement=True, generator=generator)
    return drawn.view(count, length).tolist()


def probability_by_definition(
    texts: Sequence[Sequence[int]], vocab: int, order: int, context: Sequence[int], token: int, min_count: int = 1
) -> float:
    """Interpolated Kneser-Ney, written down as in the literature: sets of neighbours, recursion."""
    times: Counter[tuple[int, ...]] = Counter()
    before: defaultdict[tuple[int, ...], set[int | None]] = defaultdict(set)
    for text in texts:
        for length in range(1, order + 1):
            for start in range(len(text) - length + 1):
                ngram = tuple(text[start : start + length])
                times[ngram] += 1
                before[ngram].add(text[start - 1] if start else None)

    def weight(ngram: tuple[int, ...]) -> int:
        return times[ngram] if len(ngram) == order else len(before[ngram])

    def probability(h: tuple[int, ...], w: int) -> float:
        if not h:
            return weight((w,)) / sum(weight((v,)) for v in range(vocab))
        weights = {v: weight((*h, v)) for v in range(vocab) if times[*h, v]}
        if not weights:
            return probability(h[1:], w)
        every = Counter(weight(ngram) for ngram in times if len(ngram) == len(h) + 1)
        once = every[1] / (every[1] + 2 * every[2]) if every[1] else 0.0
        discount = min(max(once, 0.1), 0.9)
        known = {v for v in weights if len(h) < 2 or times[*h, v] >= min_count}
        seen = {v: max(weights[v] - discount, 0.0) / sum(weights.values()) for v in known}
        return seen.get(w, 0.0) + (1.0 - sum(seen.values())) * probability(h[1:], w)

    return probability(tuple(context)[-(order - 1) :] if order > 1 else (), token)
