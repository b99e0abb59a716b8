"""Expected tokens of a recurrent head's beams: replays their trees along the target's text, and calibrates them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from truedraft.drafters.heads.acceptance import AcceptanceOdds, numbers_of, scores_by
from truedraft.drafters.heads.calibration import BEAMS_FACT, FACT
from truedraft.kinds.redrafter.beams import Beams, beam_search, merge, with_dropped
from truedraft.kinds.redrafter.module import RedrafterHead, RedrafterRunner
from truedraft.measure.replay import (
    BUDGETS,
    CALIBRATED,
    NEVER,
    RANKS,
    RAW,
    TREE_TEMPERATURES,
    Trace,
    TraceReplay,
    WrittenText,
    chunks_of,
    cross_replayed,
    fit_survival,
    raw_is_kept,
    starts_of,
    tree_depths,
)
from truedraft.models.base import LanguageModel

_WIDTHS = (1, 2, 4, 8, 16, 32)  # replayed numbers of beams, including those of `BUDGETS`
_POSITIONS = 3000  # approximate number per replay, which runs the head for every beam at each
_ROWS = 2048  # beams per batch
_UNDRAFTED = -2  # neither a token nor the end of a beam


@dataclass(frozen=True, slots=True)
class BeamTokens:
    """Replayed tokens per target call with beams of one width and length, by rising sizes of the cut merged trees.

    `listed` is the number of tokens of a step's longest beams, and `merged` their mean number of nodes after merging.
    """

    beams: int
    length: int
    nodes: tuple[int, ...]
    tokens: tuple[float, ...]
    listed: int
    merged: float

    def at(self, nodes: int) -> float:
        """With `nodes` nodes, or with all if the beams have fewer."""
        points = list(zip(self.nodes, self.tokens, strict=True))
        return next(tokens for at, tokens in reversed(points) if at <= nodes)


@dataclass(frozen=True)
class ReplayedBeams:
    """Expected tokens of beams for one kind of requests, replayed on held-out text.

    Attributes:
        survival: scores of beams; None if the head's own probabilities were better.
        compared: tokens per target call at the smaller of `BUDGETS`, by survival ("calibrated"), fitted to one half of
            the text and replayed on the other, and by probability ("raw"); {} if a half is too short.
    """

    promises: Sequence[BeamTokens]
    survival: AcceptanceOdds | None = None
    compared: Mapping[str, float] = field(default_factory=dict)


def facts_of(replayed: Mapping[str, ReplayedBeams]) -> dict[str, Any]:
    """The facts stored with the head, for JSON."""
    return {
        BEAMS_FACT: {kind: list(map(asdict, of_kind.promises)) for kind, of_kind in replayed.items()},
        FACT: {kind: of.survival.depths for kind, of in replayed.items() if of.survival is not None},
        "compared": {kind: dict(of_kind.compared) for kind, of_kind in replayed.items()},
    }


def replay_beams(
    target: LanguageModel,
    head: RedrafterHead,
    text: WrittenText,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, ReplayedBeams]:
    """Calibrate the survival of the head's guesses, and replay beams of several widths and all lengths.

    `text` is written by the target at both of `TREE_TEMPERATURES`, and used for nothing else.
    """
    runner, found = RedrafterRunner(head, target), {}
    length, total = head.config.length, len(_WIDTHS) * len(TREE_TEMPERATURES)
    for number, (kind, temperature) in enumerate(TREE_TEMPERATURES.items()):
        traces = text.traces(temperature)
        some = traces[:: max(1, sum(trace.steps for trace in traces) // _POSITIONS)]
        before = number * len(_WIDTHS)

        def follow(done: int, _: int, before: int = before) -> None:
            on_progress(before + done, total)

        compared = compare_beams(runner, some, length)
        survival = None if raw_is_kept(compared, temperature) else beam_survival(runner, traces, length)
        tokens = tokens_of_beams(runner, some, _WIDTHS, length, survival, on_progress=follow)
        found[kind] = ReplayedBeams(tokens, survival, compared)
    return found


def compare_beams(runner: RedrafterRunner, traces: Sequence[Trace], length: int) -> dict[str, float]:
    """Tokens per call by survival, and by probability; see `ReplayedBeams.compared`."""
    width = BUDGETS[0]

    def ways(fitted: Sequence[Trace], other: Sequence[Trace]) -> Mapping[str, TraceReplay]:
        by = {CALIBRATED: beam_survival(runner, fitted, length), RAW: None}
        return {way: _replays(runner, other, width, length, survival)[0][-1] for way, survival in by.items()}

    halves = traces[::2], traces[1::2]
    enough = all(any(trace.steps for trace in half) for half in halves)
    return cross_replayed(halves, ways, (width,)) if enough else {}


def tokens_of_beams(
    runner: RedrafterRunner,
    traces: Sequence[Trace],
    widths: Sequence[int],
    length: int,
    survival: AcceptanceOdds | None = None,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[BeamTokens]:
    """Replay the trees of beams of some widths and all lengths up to `length`, on traces of the temperature of use.

    Returns, for each width, all lengths, rising; [] if no trace has two tokens, because then nothing is drafted.
    """
    if not any(trace.steps for trace in traces):
        return []
    found: list[BeamTokens] = []
    for done, width in enumerate(widths):
        on_progress(done, len(widths))
        replays, merged = _replays(runner, traces, width, length, survival)
        for number, (replay, nodes_merged) in enumerate(zip(replays, merged, strict=True), 1):
            nodes, tokens = zip(*replay.points(), strict=True)
            listed = min(width, runner.vocab_size) * number
            found.append(BeamTokens(width, number, nodes, tokens, listed, nodes_merged))
    on_progress(len(widths), len(widths))
    return found


def _replays(
    runner: RedrafterRunner, traces: Sequence[Trace], beams: int, length: int, survival: AcceptanceOdds | None
) -> tuple[list[TraceReplay], list[float]]:
    """The replay for beams of each length, and the nodes of the longest; near an answer's end trees are less deep."""
    by_length, merged = _fewest_nodes(runner, traces, min(beams, runner.vocab_size), length, survival)
    replays = []
    for number in range(1, length + 1):
        depths = torch.from_numpy(tree_depths(traces, number))
        fewest = torch.full((len(depths), number), NEVER)
        for depth, own in enumerate(by_length[:number], 1):
            rows = depths == depth
            fewest[rows, :depth] = own[rows]
        replays.append(TraceReplay(fewest, starts_of(traces), beams * number))
    return replays, merged


def _fewest_nodes(
    runner: RedrafterRunner, traces: Sequence[Trace], width: int, length: int, survival: AcceptanceOdds | None
) -> tuple[list[Tensor], list[float]]:
    """Per length, how many nodes `[positions, length]` hold the continuation, and the mean number of nodes."""
    fewest: list[list[Tensor]] = [[] for _ in range(length)]
    merged = [0.0] * length
    device = runner.device
    scores = scores_by(numbers_of([survival], length, width, device))
    for hidden, drawn, following in chunks_of(traces, length, max(1, _ROWS // width)):
        truth = following.masked_fill(following < 0, _UNDRAFTED).to(device)
        growing = beam_search(runner, hidden.to(device), drawn.to(device), width, scores)
        steps: list[Beams] = []
        for number, longest in enumerate(itertools.islice(growing, length)):
            steps.append(longest)
            beams = with_dropped(steps)
            node_of = merge(beams, beams.tokens[0].numel()).node_of
            fewest[number].append(_nodes_needed(beams, node_of, truth[:, : number + 1]).cpu())
            merged[number] += float(merge(longest, longest.tokens[0].numel()).counts.sum())
    found = [torch.cat(each) for each in fewest]
    return found, [each / len(found[0]) for each in merged]


def _nodes_needed(beams: Beams, node_of: Tensor, truth: Tensor) -> Tensor:
    """How many nodes hold each prefix of `truth` `[rows, length]`, or `NEVER`."""
    right = (beams.tokens == truth[:, None]).to(torch.uint8).cumprod(dim=-1)  # [rows, beams, length]
    holder = right.argmax(dim=1, keepdim=True)  # the first beam that is right so far, if any
    return torch.where(right.any(dim=1), node_of.gather(1, holder).squeeze(1) + 1, NEVER)


@torch.inference_mode()
def beam_survival(runner: RedrafterRunner, traces: Sequence[Trace], length: int) -> AcceptanceOdds:
    """Odds of acceptance, fitted to the guesses after the text's own tokens."""
    count = min(RANKS, runner.vocab_size)
    log_probs = [torch.zeros(length, 0, count)]
    ranks = [torch.zeros(0, length, dtype=torch.int64)]
    for hidden, drawn, following in chunks_of(traces, length, _ROWS):
        tokens = torch.cat([drawn[:, None], following], dim=1).to(runner.device)  # [rows, length + 1]
        context, state = runner.context(hidden.to(runner.device)), None
        of_depth = []
        for depth in range(length):
            state = runner.advance(state, tokens[:, depth].clamp(min=0))
            found = runner.likeliest(context, state, count)
            right = (found.ids == tokens[:, depth + 1, None]).to(torch.uint8)
            rank = torch.where(right.bool().any(dim=1), right.argmax(dim=1), count)
            of_depth.append((found.log_probs, rank.masked_fill(tokens[:, depth + 1] < 0, -1)))
        log_probs.append(torch.stack([each for each, _ in of_depth]).float().cpu())
        ranks.append(torch.stack([each for _, each in of_depth], dim=1).cpu())
    return fit_survival(torch.cat(log_probs, dim=1), torch.cat(ranks))
