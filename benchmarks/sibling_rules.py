"""Several drafts of one context: which draws and which exact rule accept most. Acceptance alone, and no times.

At one place, K tokens of a draft's distribution q are judged against the target's p:

- *independent*: K draws from q by recursive rejection, what `draft,chains=K` drafts and the default rule judges;
- *without replacement*: K draws, each without those before it, by recursive rejection, as `draft,branching=K-...`;
- *K-SEQ*: K independent draws, each accepted with min(1, p / (rho q)), rho the least number that leaves a residual
  (SpecTr, Sun et al. 2310.15141);
- *bound*: what no rule for K independent draws can pass, 1 - max over sets H of q(H)^K - p(H), by the cut of least
  weight between draws and tokens. The largest difference is attained by the tokens of least p / q.

First over random p and q, then over those of the embedded pair along the target's own answers, then for whole steps of
several chains: tokens per target call by replay, and the nodes that they come to by drawing them. Writes one JSON
object a line.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import nodes_of
from truedraft.core.probs import probs_from_logits
from truedraft.core.tree import chain_shape
from truedraft.embedded import heldout_prompts_file
from truedraft.models.base import LanguageModel, Segment
from truedraft.planning.siblings import ChainDraws, Draws, TreeDraws

Numbers = NDArray[Any]
TEMPERATURES = (0.5, 0.8, 1.0, 1.5)
COUNTS = (2, 3, 4)
CHAINS = (2, 3, 4, 6)
LENGTHS = (2, 4, 6)
TREES = ((2, 2, 1, 1), (3, 2, 1), (3, 2, 1, 1))
_EVERY = 6  # of the places nodes are counted at one
_HALVINGS = 40


def main() -> None:
    """Work everything out and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--random", type=int, default=200, help="random pairs of distributions of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sibling_rules.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = list(random_rows(options.random))
    target, draft = load_model("embedded:target"), load_model("embedded:draft")
    lines = heldout_prompts_file().read_text().splitlines()[: options.prompts]
    prompts = [json.loads(line)["text"] for line in lines]
    for temperature in TEMPERATURES:
        answers = Answers(target, draft, prompts, temperature, options.tokens)
        rows += [node_row(answers), *chain_rows(answers)]
        print(json.dumps(rows[-1]), flush=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ------------------------------------------------------------------------------- one place


def independent(p: Numbers, q: Numbers, draws: int) -> float:
    """Acceptance of K independent draws by recursive rejection: each is rejected with 1 - sum of min(p_j, q)."""
    rejected = 1.0
    for _ in range(draws):
        rejected *= max(0.0, 1.0 - np.minimum(p, q).sum())
        left = (p - q).clip(min=0.0)
        if left.sum() <= 0.0:
            return 1.0
        p = left / left.sum()
    return 1.0 - rejected


def without_replacement(p: Numbers, q: Numbers, draws: int) -> float:
    """Acceptance of K draws without replacement by recursive rejection, over every rejected token."""
    accepted = float(np.minimum(p, q).sum())
    left = (p - q).clip(min=0.0)
    if draws == 1 or left.sum() <= 0.0:
        return accepted
    for token in np.flatnonzero(q > p):
        rest = q.copy()
        rest[token] = 0.0
        if rest.sum() > 0.0:
            share = float(q[token] - p[token])
            accepted += share * without_replacement(left / left.sum(), rest / rest.sum(), draws - 1)
    return accepted


def k_seq(p: Numbers, q: Numbers, draws: int) -> tuple[float, float]:
    """Acceptance of K independent draws by K-SEQ, and its rho, in [1, K], by halving.

    A draw is accepted with beta = sum of min(p / rho, q), so x comes by acceptance with min(p(x) / rho, q(x)) times
    (1 - (1 - beta)^K) / beta, which must not be more than p(x): rho is the least number that is no less than that.
    """
    least, most = 1.0, float(draws)
    for _ in range(_HALVINGS):
        rho = (least + most) / 2.0
        beta = np.minimum(p / rho, q).sum()
        if 1.0 - (1.0 - beta) ** draws > rho * beta:
            least = rho
        else:
            most = rho
    return float(1.0 - (1.0 - np.minimum(p / most, q).sum()) ** draws), most


def bound(p: Numbers, q: Numbers, draws: int) -> float:
    """The most that any rule accepts of K independent draws."""
    order = np.argsort(p / np.maximum(q, 1e-300))
    below_p, below_q = (np.concatenate([[0.0], np.cumsum(each[order])]) for each in (p, q))
    return float(1.0 + (below_p - below_q**draws).min())


def random_rows(count: int) -> Sequence[dict[str, Any]]:
    """Means over random distributions: of each how even it is, by the concentration of a Dirichlet distribution."""
    generator = np.random.default_rng(1)
    rows = []
    for vocab, even_p, even_q, draws in itertools.product((8,), (0.1, 1.0, 10.0), (0.1, 1.0, 10.0), (2, 3)):
        found = []
        for _ in range(count):
            p, q = (generator.dirichlet([even] * vocab) for even in (even_p, even_q))
            ways = independent(p, q, draws), without_replacement(p, q, draws), k_seq(p, q, draws)[0], bound(p, q, draws)
            found.append(ways)
        means = np.mean(found, axis=0)
        better = np.mean([each[2] > each[1] + 1e-9 for each in found])
        rows.append(
            {"what": "random", "vocab": vocab, "even_p": even_p, "even_q": even_q, "draws": draws}
            | dict(zip(("independent", "without_replacement", "k_seq", "bound"), map(float, means), strict=True))
            | {"k_seq_above_without_replacement": float(better)}
        )
    return rows


# ------------------------------------------------------------------------------- the embedded pair


class Answers:
    """What a target answers to prompts, with its distributions and a draft's at every token but the first.

    Args:
        target: that answers.
        draft: of the same tokenizer.
        prompts: texts.
        temperature: of the answers.
        tokens: of each.
    """

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, prompts: Sequence[str], temperature: float, tokens: int
    ) -> None:
        assert target.tokenizer is not None
        self.temperature, self.draft = temperature, draft
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
        made = Engine(target, controller="fixed", entropy=0).generate(list(prompts), params)
        self.places: list[list[tuple[Numbers, Numbers, int]]] = []
        self.contexts: list[list[int]] = []
        for prompt, answer in zip(prompts, made, strict=True):
            ids = [*target.tokenizer.encode(prompt), *answer.token_ids]
            count = len(answer.token_ids)
            p, q = (_distributions(model, ids, count, params) for model in (target, draft))
            self.places.append(list(zip(p[1:], q[1:], answer.token_ids[1:], strict=True)))
            self.contexts += [ids[: len(ids) - count + place] for place in range(1, count, _EVERY)]


def _distributions(model: LanguageModel, ids: list[int], count: int, params: SamplingParams) -> Numbers:
    """What a model gives to the last `count` tokens of a text, `[count, vocab]`."""
    cache = model.new_cache()
    segment = Segment(cache, torch.tensor(ids), chain_shape(len(ids)), range(len(ids)))
    logits = model.forward([segment]).logits[-count - 1 : -1].float()
    model.release_cache(cache)
    found: Numbers = probs_from_logits(logits, params).double().numpy()
    return found


def node_row(answers: Answers) -> dict[str, Any]:
    """Mean acceptance of K draws at one place, and how many of them differ."""
    row: dict[str, Any] = {"what": "one place", "temperature": answers.temperature}
    places = [place for each in answers.places for place in each]
    row["places"] = len(places)
    row["one"] = float(np.mean([np.minimum(p, q).sum() for p, q, _ in places]))
    for draws in COUNTS:
        generator = np.random.default_rng(1)
        row[f"of_{draws}"] = {
            "independent": float(np.mean([independent(p, q, draws) for p, q, _ in places])),
            "without_replacement": float(
                np.mean([estimated_without_replacement(p, q, draws, generator) for p, q, _ in places])
            ),
            "k_seq": float(np.mean([k_seq(p, q, draws)[0] for p, q, _ in places])),
            "bound": float(np.mean([bound(p, q, draws) for p, q, _ in places])),
            "different": float(np.mean([(1.0 - (1.0 - q) ** draws).sum() for _, q, _ in places])),
        }
    return row


def estimated_without_replacement(p: Numbers, q: Numbers, draws: int, generator: np.random.Generator) -> float:
    """An unbiased estimate of `without_replacement`, for large vocabularies: one rejected token stands for all."""
    accepted, reached = 0.0, 1.0
    for _ in range(draws):
        share = float(np.minimum(p, q).sum())
        accepted += reached * share
        beyond, left = (q - p).clip(min=0.0), (p - q).clip(min=0.0)
        if left.sum() <= 0.0 or beyond.sum() <= 0.0:
            break
        reached *= 1.0 - share
        q = q.copy()
        q[generator.choice(len(q), p=beyond / beyond.sum())] = 0.0
        if q.sum() <= 0.0:
            break
        p, q = left / left.sum(), q / q.sum()
    return accepted


class KSeqDraws(ChainDraws):
    """Chains whose draws are judged by K-SEQ; see `ChainDraws`.

    Of m draws the j-th is the first to be accepted with (1 - beta)^(j - 1) times what one is. Each of those before it
    was x with (q(x) - a(x)) / (1 - beta), a(x) = min(p(x) / rho, q(x)); each behind it with q(x).
    """

    def _factors(self, p_x: float, p: torch.Tensor | None, q: torch.Tensor, token: int) -> Numbers:
        assert p is not None
        target, draft = p.numpy(), q.numpy()
        found = self._nothing()
        for came in range(1, len(found)):
            rho = k_seq(target, draft, came)[1]
            beta = float(np.minimum(target / rho, draft).sum())
            mine = min(target[token] / rho, draft[token])
            before = min(1.0, float(draft[token] - mine) / (1.0 - beta)) if beta < 1.0 else 0.0
            for draw in range(came):
                passing = np.convolve(_binomial(draw, before), _binomial(came - draw - 1, float(draft[token])))
                found[came, 1 : 1 + len(passing)] += (1.0 - beta) ** draw * mine / target[token] * passing
        return found


def _binomial(count: int, chance: float) -> list[float]:
    return [math.comb(count, n) * chance**n * (1.0 - chance) ** (count - n) for n in range(count + 1)]


def chain_rows(answers: Answers) -> list[dict[str, Any]]:
    """Tokens per target call and nodes of a step, for chains and trees of several sizes."""
    drawn = drawn_chains(answers, max(LENGTHS))

    def merged(count: int, length: int) -> float:
        return float(np.mean([len({c[:n] for c in of[:count] for n in range(1, length + 1)}) for of in drawn]))

    rows = _rows(answers, "one chain", 1, lambda count, length: float(length), lambda: ChainDraws(1))
    for count in CHAINS:
        rows += _rows(answers, "independent chains", count, merged, functools.partial(ChainDraws, count))
        rows += _rows(answers, "independent chains, K-SEQ", count, merged, functools.partial(KSeqDraws, count))
        made = functools.partial(TreeDraws, (count, *(1,) * (max(LENGTHS) - 1)), 1)
        rows += _rows(answers, "chains without replacement", count, lambda n, length: float(n * length), made)
    for branching in TREES:
        tokens = tokens_per_call(noted(answers, functools.partial(TreeDraws, branching, 1)), len(branching))
        row = {"what": "steps", "temperature": answers.temperature, "way": "tree without replacement"}
        rows.append(row | {"sizes": list(branching), "nodes": float(nodes_of(branching)), "tokens_per_call": tokens})
    return rows


def _rows(
    answers: Answers, way: str, count: int, nodes: Callable[[int, int], float], make: Callable[[], Draws]
) -> list[dict[str, Any]]:
    """For every length."""
    made = noted(answers, make)
    row = {"what": "steps", "temperature": answers.temperature, "way": way}
    return [
        row
        | {
            "sizes": [count, length],
            "nodes": nodes(count, length),
            "tokens_per_call": tokens_per_call(made, length),
        }
        for length in LENGTHS
    ]


def noted(answers: Answers, make: Callable[[], Draws]) -> list[tuple[Draws, int]]:
    """The draws of each answer, all its places looked at, and how many these are."""
    found = []
    for places in answers.places:
        draws = make()
        for p, q, token in places:
            draws.note(float(p[token]), torch.from_numpy(p), torch.from_numpy(q), token)
        found.append((draws, len(places)))
    return found


def tokens_per_call(noted: Sequence[tuple[Draws, int]], depth: int) -> float:
    """Of decoding all answers with steps of some depth."""
    calls = tokens = 0.0
    for draws, places in noted:
        starts = np.zeros(places + depth + 2)
        starts[0] = 1.0
        for place in range(places):
            reach = np.concatenate([[1.0], draws.survival(place, depth), [0.0]])
            exactly = reach[:-1] - reach[1:]
            starts[place + 1 : place + 1 + len(exactly)] += starts[place] * exactly
        calls += float(starts[:places].sum())
        tokens += places
    return tokens / calls


def drawn_chains(answers: Answers, length: int) -> list[list[tuple[int, ...]]]:
    """For some places the chains that the draft draws there."""
    count = max(CHAINS)
    prompts = [context for context in answers.contexts for _ in range(count)]
    params = SamplingParams(max_tokens=length, temperature=answers.temperature, ignore_eos=True)
    made = Engine(answers.draft, controller="fixed", max_batch=64, entropy=9000).generate(prompts, params)
    chains = [tuple(each.token_ids) for each in made]
    return [chains[first : first + count] for first in range(0, len(chains), count)]


if __name__ == "__main__":
    main()
