"""Speculative sampling along chains and trees, by recursive rejection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.core import probs as L
from truedraft.core import transfers
from truedraft.core.noise import Noise
from truedraft.core.probs import without_tokens
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.verification.host import HostWalk, host_verdicts
from truedraft.verification.rule import BatchVerdicts, JudgedRow, Outcome, Rule
from truedraft.verification.walk import Batch, Number, either, jump_table, larger, walks_ended

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

    # The four parts of the rule, which both walks call. Tests break them one at a time, and must fail.

    def accept_probability(self, p_x: Number, q_x: Number) -> Number:
        """The probability of accepting a token with target probability `p_x` and draft probability `q_x`."""
        return p_x / larger(larger(p_x, q_x), _TINY)  # min(1, p/q); 0 where p is 0, whatever q is

    def rejected(self, p: Tensor, q: Tensor) -> Tensor:
        """What is left of the target's distributions `[..., vocab]` after draws from `q` were rejected.

        Several candidates of one tree row are rejected at once, with q 1 at each of them, which removes them from p.
        """
        return L.residual(p, q)

    def left_of_candidate(self, p_x: Number, taken: Number) -> Number:
        """What is left of a candidate's probability `p_x` after candidates of its row with total mass `taken` were
        rejected.

        Both are probabilities of the target before any rejection.
        """
        left = 1.0 - taken
        return either(left > 0.0, p_x / larger(left, _TINY), (p_x > 0.0) * 1.0)

    def removed(self, q: Tensor, tokens: Tensor) -> Tensor:
        """The draft's distributions `[..., vocab]` without `tokens` `[..., tokens]`, drawn without replacement."""
        return without_tokens(q, tokens)

    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        if not proposals:
            return BatchVerdicts.made([])
        if not len(proposals) == len(probs) == len(noise):
            raise ValueError(f"{len(proposals)} proposals, {len(probs)} tables and {len(noise)} noises are no batch")
        if not transfers.waits(probs[0].device):
            return BatchVerdicts.made(host_verdicts(self, proposals, probs, noise))
        batch = Batch.of(proposals, probs, noise)
        plan = batch.plan
        jump = jump_table(plan, self.first_stays(batch, *batch.first_looks())) if plan.drafts else plan.own
        ends, left = self._end(batch, jump, jump[plan.roots])
        finals = L.draw(left, batch.final_uniforms(ends))
        return BatchVerdicts((ends, finals), partial(walks_ended, plan.first_rows))

    def first_stays(self, batch: Batch, p_x: Tensor, q_x: Tensor) -> Tensor:
        """Which draws `[draws]` of the first runs would be accepted; `p_x` and `q_x` are their probabilities."""
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

        Args:
            jump: `[rows]`: the result of `jump_table`.
            ends: `[requests]`: tree rows with a rejected first run, or without draws.

        Returns:
            The tree rows where walks end `[requests]`, and what is left of p there `[requests, vocab]`.
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
