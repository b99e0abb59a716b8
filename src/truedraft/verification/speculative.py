"""Speculative sampling along chains and trees, by recursive rejection.

On the CPU the walk (`HostWalk`) reads each number when it needs it, because the batched walk is slower there, by 65 to
330 microseconds per step for one request (benchmarks/LOG.md, "One house"). Both make the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import Noise, Purpose
from truedraft.core.probs import without_tokens
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.verdict import Verdict
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome, Rule, verdict_at
from truedraft.verification.walk import Batch, Number, either, jump_table, larger, walks_ended

_CANDIDATES = {DrawKind.DETERMINISTIC}
_ENTRIES_TOGETHER = 1 << 16
"""Sums over this many entries fit the processor's cache; memory for larger ones is newly allocated each time."""


class HostWalk:
    """A walk down one proposal.

    Args:
        probs: the target's distributions.

    Attributes:
        path: the accepted nodes.
        row: tree row where the walk ended.
        left: `[vocab]`: the distribution of the last token.
    """

    def __init__(
        self,
        rule: SpeculativeSampling,
        proposal: Proposal,
        probs: L.RowProbs,
        noise: Noise,
    ) -> None:
        self.rule = rule
        self.proposal = proposal
        self.probs = probs
        self.noise = noise
        self._q = None if proposal.probs is None else L.as_array(proposal.probs)
        self.path: list[int] = []
        self.row = 0
        self.left: Tensor
        while (accepted := self.judge(self.row)) is not None:
            self.path += accepted
            self.row = self.path[-1] + 1

    def p_x(self, node: int) -> float:
        """The original distribution's probability of a node's token."""
        tree = self.proposal.tree
        return self.probs.entry(tree.shape.parents[node] + 1, tree.host_ids[node])

    def q_x(self, draw: Draw) -> float:
        """The probability of a draw in the distribution that it is from, before any removal."""
        if self._q is None or draw.dist < 0:
            return 1.0
        return float(self._q[draw.dist, self.proposal.tree.host_ids[draw.child]])

    @property
    def uniform(self) -> float:
        purpose = Purpose.RECOVERED if self.proposal.draws[self.row] else Purpose.BONUS
        return self.noise.uniform(purpose, len(self.path))

    def judge(self, row: int) -> list[int] | None:
        """The nodes accepted from a tree row on; None, with `left` set, where the walk ends there."""
        draws = self.proposal.draws[row]
        if not draws:
            self.left = self.probs[row]
            return None
        if {draw.kind for draw in draws} == _CANDIDATES:
            return self._judge_candidates(row, draws)
        return self._judge_draws(row, draws)

    def _stays(self, index: int, p_x: float, q_x: float) -> bool:
        number = self.noise.uniform(Purpose.ACCEPT, len(self.path), index)
        return bool(number < self.rule.accept_probability(p_x, q_x))

    def _judge_candidates(self, row: int, draws: Sequence[Draw]) -> list[int] | None:
        """Judge deterministic draws: rejections only remove mass from p, so their total mass determines the rest."""
        ids = self.proposal.tree.host_ids
        excluded: dict[int, None] = {}
        taken = 0.0
        for index, draw in enumerate(draws):
            token, mass = ids[draw.child], self.p_x(draw.child)
            p_x = 0.0 if token in excluded else self.rule.left_of_candidate(mass, taken)  # 0: drafted twice
            if self._stays(index, p_x, 1.0):
                return [draw.child]
            if token not in excluded:
                excluded[token] = None
                taken += mass
        self.left = self.rule.rejected(self.probs[row], self._one_hot(*excluded))
        return None

    def _judge_draws(self, row: int, draws: Sequence[Draw]) -> list[int] | None:
        ids, p = self.proposal.tree.host_ids, self.probs[row]
        excluded: dict[int, list[int]] = {}  # tokens removed from distributions at this tree row, by distribution
        for index, draw in enumerate(draws):
            token = ids[draw.child]
            taken = excluded.get(draw.dist, []) if draw.kind is DrawKind.WITHOUT_REPLACEMENT else []
            q = self._drawn_from(draw, taken) if taken else None
            # Distributions are unchanged until the first draw was rejected.
            p_x = float(p[token]) if index else self.p_x(draw.child)
            q_x = self.q_x(draw) if q is None else float(q[token])
            if self._stays(index, p_x, q_x):
                return [draw.child]
            p = self.rule.rejected(p, self._drawn_from(draw, []) if q is None else q)
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
                excluded[draw.dist] = [*taken, token]
        self.left = p
        return None

    def _drawn_from(self, draw: Draw, taken: Sequence[int]) -> Tensor:
        if draw.dist < 0:
            return self._one_hot(self.proposal.tree.host_ids[draw.child])
        assert self.proposal.probs is not None
        q = self.proposal.probs[draw.dist].to(self.probs.device)  # the draft may be on another device
        return self.rule.removed(q, torch.tensor(taken)) if taken else q

    def _one_hot(self, *tokens: int) -> Tensor:
        return torch.zeros_like(self.probs[0]).index_fill_(0, torch.tensor(tokens), 1.0)


def host_verdicts(
    rule: SpeculativeSampling, proposals: Sequence[Proposal], probs: Sequence[L.RowProbs], noise: Sequence[Noise]
) -> list[Verdict]:
    """The verdicts on a batch of at least one request; arguments as in `Rule.verify`."""
    walks = [rule.host_walk(rule, *each) for each in zip(proposals, probs, noise, strict=True)]
    together = max(1, _ENTRIES_TOGETHER // probs[0].shape[-1])
    drawn = []
    for first in range(0, len(walks), together):
        group = walks[first : first + together]
        left = group[0].left[None] if len(group) == 1 else torch.stack([walk.left for walk in group])
        drawn.append(L.draw(left, torch.tensor([walk.uniform for walk in group], dtype=torch.float64)))
    tokens = (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).tolist()
    return [verdict_at(walk.proposal, walk.path, token) for walk, token in zip(walks, tokens, strict=True)]


_TINY = torch.finfo(torch.float64).tiny


class SpeculativeSampling(Rule):
    """Accept a drafted x with probability min(1, p(x)/q(x)); on rejection continue with norm(max(0, p - q)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. Several draws at a node are judged in order, each
    against what the rejections before it left of p (SpecInfer 2305.09781; RSD 2402.14160); drawn without replacement, q
    loses each rejected token and is renormalised. A deterministic candidate has a one-hot q. When no draw is accepted,
    the token is drawn from what is left of p: *recovered*; without draws to judge it is a *bonus*. At temperature 0 the
    same rule accepts exactly the argmax.
    """

    name: ClassVar[str] = "speculative"
    lossless: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]] = frozenset(
        {DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC}
    )

    host_walk: ClassVar[type[HostWalk]] = HostWalk

    @property
    def reads_rows(self) -> bool:
        # One that accepts or measures in its own way reads whole tensors.
        accept, measured = (getattr(each, "__func__", None) for each in (self.accept, self.measured))
        return accept is SpeculativeSampling.accept and measured is Rule.measured

    # The four parts of the rule, which both walks call. Tests break them one at a time, and must fail.

    def accept_probability(self, p_x: Number, q_x: Number) -> Number:
        return p_x / larger(larger(p_x, q_x), _TINY)  # min(1, p/q); 0 where p is 0, whatever q is

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        """What is left of p `[..., vocab]` after a rejection; q is 1 at each of several candidates of one row."""
        return L.residual(p, q)

    def left_of_candidate(self, p_x: Number, taken: Number) -> Number:
        """What is left of a candidate's original `p_x` after ones of total mass `taken` in its row were rejected."""
        left = 1.0 - taken
        return either(left > 0.0, p_x / larger(left, _TINY), (p_x > 0.0) * 1.0)

    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        """The draft's distributions `[..., vocab]` without `tokens` `[..., tokens]`, drawn without replacement."""
        return without_tokens(q, tokens)

    def accept(
        self, proposals: Sequence[Proposal], probs: Sequence[Tensor | L.RowProbs], noise: Sequence[Noise]
    ) -> BatchVerdicts:
        if not proposals:
            return BatchVerdicts.made([])
        if not len(proposals) == len(probs) == len(noise):
            raise ValueError(f"{len(proposals)} proposals, {len(probs)} tables and {len(noise)} noises are no batch")
        if not transfers.waits(probs[0].device):
            rows = [L.RowProbs(own) if isinstance(own, Tensor) else own for own in probs]
            return BatchVerdicts.made(host_verdicts(self, proposals, rows, noise))
        batch = Batch.of(proposals, [own for own in probs if isinstance(own, Tensor)], noise)
        plan = batch.plan
        jump = jump_table(plan, self.first_stays(batch, *batch.first_looks())) if plan.drafts else plan.own
        ends, left = self._end(batch, jump, jump[plan.roots])
        finals = L.draw(left, batch.final_uniforms(ends))
        return BatchVerdicts((ends, finals), partial(walks_ended, plan.first_rows))

    def first_stays(self, batch: Batch, p_x: Tensor, q_x: Tensor) -> Tensor:
        """Which draws `[draws]` of the first runs would be accepted."""
        plan = batch.plan
        if plan.width > 1:  # each candidate of a tree row is judged by what is left of p after those before it
            table = p_x.new_zeros(len(plan.depths), plan.width)  # [rows, width]
            table[plan.draw_row, plan.draw_column] = p_x
            table = batch.without_repeated(table)
            taken = torch.zeros_like(table)
            taken[:, 1:] = table.cumsum(-1)[:, :-1]
            p_x = self.left_of_candidate(table, taken)[plan.draw_row, plan.draw_column]
        return batch.uniforms[plan.draw_key] < self.accept_probability(p_x, q_x)

    def _end(self, batch: Batch, jump: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Continue from rejected first runs until walks have nothing more to judge.

        `jump` `[rows]` is the result of `jump_table`, `ends` `[requests]` the tree rows with a rejected first run, or
        without draws. Returns the tree rows where walks end `[requests]`, and what is left of p there `[requests,
        vocab]`.
        """
        plan, left = batch.plan, batch.target(ends)
        run = torch.where(plan.is_drawn[ends], ends, -1)  # the rejected run; -1 where nothing is left to reject
        for number in range(plan.rounds):
            rejected = run.clamp_min(0)
            rest = self.rejected(left, batch.draft(rejected, self.removed))
            left = torch.where((run >= 0)[:, None], rest, left)
            if number + 1 < plan.rounds:
                run = torch.where(run >= 0, plan.following[rejected], -1)
                ends, left, run = self._judge_next(batch, jump, (ends, left, run))
        return ends, left

    def _judge_next(
        self, batch: Batch, jump: Tensor, state: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Judge the next draw of walks against what is left of p; those that accept it continue below it.

        The state of the walks is their tree row, what is left of p there, and the run to judge, -1 where there is none.
        In the returned state the run is a rejected one, or -1.
        """
        plan = batch.plan
        ends, left, run = state
        judged, runs = run >= 0, run.clamp_min(0)
        tokens = batch.tokens[plan.run_node[runs]][:, None]  # [requests, 1]
        p_x = left.gather(1, tokens)[:, 0].double()
        q_x = batch.draft(runs, self.removed).gather(1, tokens)[:, 0].double()
        stays = judged & (batch.uniforms[plan.run_key[runs]] < self.accept_probability(p_x, q_x))
        moved = torch.where(stays, jump[plan.run_child[runs]], ends)
        run = torch.where(stays, torch.where(plan.is_drawn[moved], moved, -1), run)
        return moved, torch.where(stays[:, None], batch.target(moved), left), run

    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        (row,) = group
        p = row.p
        outcomes = []
        reach = 1.0
        reduced: dict[int, Tensor] = {}
        for draw in row.draws:
            again = draw.kind is DrawKind.WITHOUT_REPLACEMENT and draw.dist in reduced
            q = reduced[draw.dist] if again else draw.q
            accept = self.accept_probability(float(p[draw.token]), float(q[draw.token]))
            outcomes.append(Outcome(reach * accept, (draw.token,), accepted=1))
            reach *= 1.0 - accept
            if reach == 0.0:
                return outcomes
            p = self.rejected(p, q)
            if draw.kind is DrawKind.WITHOUT_REPLACEMENT:
                reduced[draw.dist] = self.removed(q, torch.tensor([draw.token]))
        outcomes.extend(Outcome(reach * float(mass), (token,), accepted=0) for token, mass in enumerate(p))
        return outcomes
