"""Negative controls for greedy and coupled answers, which must equal plain decoding's token by token.

Given text and noise a law is one-hot here: the target's choice. So a fault's total variation is the share of tokens
that are not the target's choice at their own prefix, and one such token is enough to be found. Noise used twice is no
such fault, for plain decoding would use it twice as well: it is found in the law, by the tests of sampled answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truedraft.certify import faults
from truedraft.certify.betting import POWER
from truedraft.certify.control_settings import beginnings
from truedraft.certify.controls import TIMES_DETECTABLE, Broken, Limits, finding_of, show_to_tests
from truedraft.certify.directions import Scored
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.scoring import plain_laws, plain_logits
from truedraft.certify.stack import Stack
from truedraft.core.laws import total_variation
from truedraft.core.noise import KeyedNoise
from truedraft.core.sampling import SamplingParams
from truedraft.drafters import DraftModel
from truedraft.drafters.base import Drafter
from truedraft.verification.coupled import coupled_choice

_PROMPTS = 4
_TOKENS = 32
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Control:
    """A fault.

    Attributes:
        name: what is wrong with the stack.
        plant: makes the broken stack of one that drafts one token a step.
        drafter: what drafts, for a target: right or wrong guesses, as the fault needs them.
        words: what that is.
    """

    name: str
    plant: Callable[[Stack], Stack]
    drafter: Callable[[Stack], Drafter]
    words: str


CONTROLS = (
    Control(
        "every draft is accepted",
        lambda stack: stack.but(coupled_rule=faults.CoupledAcceptsAlways()),
        lambda stack: faults.Wrong(stack.target.vocab_size),
        "drafts that are hardly ever right",
    ),
    Control(
        "the target's cache is off by one",
        lambda stack: stack.but(target=faults.LosesLastAccepted(stack.target)),
        lambda stack: DraftModel(stack.target, num_speculative_tokens=1),
        "drafted by the target itself",
    ),
)


def coupled_control_findings(
    stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams, tell: Callable[[float], None]
) -> list[Finding]:
    """Show faults to the comparison with plain decoding.

    Args:
        stack: the one that is certified.
        prompts: token ids.
        params: the user's options: greedy, or coupled.
        tell: is told the fraction done.
    """
    findings = []
    asked = list(prompts)[:_PROMPTS]
    for number, control in enumerate(CONTROLS):
        healthy = stack.but(drafter=faults.OneToken(control.drafter(stack)))
        findings.append(_show(control, control.plant(healthy), stack, asked, params))
        tell((number + 1) / len(CONTROLS))
    return findings


def shared_noise_finding(
    stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams, limits: Limits
) -> Finding:
    """Show a step whose tokens share their Gumbel noise to the tests of sampled answers.

    Args:
        stack: the one that is certified.
        prompts: token ids.
        params: the user's options, coupled.
        limits: what the tests may use.
    """
    itself = faults.OneToken(DraftModel(stack.target, num_speculative_tokens=1))
    planted = stack.but(drafter=itself, coupled_rule=faults.CoupledOneKey())
    broken = Broken(planted, stack, params, "drafted by the target itself")
    shown = show_to_tests(broken, _off_by_sharing, beginnings(prompts), limits)
    return finding_of("two tokens share their noise", shown, limits.false_alarm)


def _off_by_sharing(scored: Scored) -> Tensor:
    """How far the laws of tokens behind an accepted one are off, `[tokens]`."""
    size = torch.zeros(len(scored.tokens))
    for place, decision in enumerate(scored.decisions):
        if decision.depth == 1:
            after = scored.laws[place].double()
            shared = law_under_shared_noise(scored.laws[place - 1], scored.tokens[place - 1], after)
            size[place] = total_variation(shared, after)
    return size


def law_under_shared_noise(p: Tensor, token: int, after: Tensor) -> Tensor:
    """The law `[vocab]`, float64, of a token chosen under `after` by the Gumbel noise that chose `token` under `p`.

    Gumbel noise is an exponential race: v arrives at E_v / p(v), E_v standard exponential. If x arrived first, at time
    T, the others still need a fresh E_v beyond T p(v), and T is standard exponential. In the second race, in units of
    T, x arrives at a = p(x) / after(x), and v starts at s(v) = p(v) / after(v) with rate after(v). With S(t) the sum
    over v != x of after(v) max(0, t - s(v)), averaging over T gives x with 1 / (1 + S(a)), and v that starts before a
    with after(v) times the integral from s(v) to a of dt / (1 + S(t))^2. S is linear between starts, where that
    integral is (t2 - t1) / ((1 + S(t1)) (1 + S(t2))).

    Worked example: p = (1/2, 1/2), after = (1/4, 3/4), token 0: a = 2, s(1) = 2/3, S(2) = 3/4 * 4/3 = 1: it comes again
    with 1/2, and 1 with 3/4 * (4/3) / (1 * 2) = 1/2.

    Args:
        p: `[vocab]`, with mass at `token`.
        token: that was chosen.
        after: `[vocab]`.
    """
    p, after = p.double(), after.double()
    possible = after > 0.0
    possible[token] = False
    starts = (p[possible] / after[possible]).cpu()
    rates = after[possible].cpu()
    last = float(p[token] / after[token]) if float(after[token]) > 0.0 else math.inf
    order = starts.argsort()
    times = starts[order].clamp_max(last)
    speed = torch.cat([torch.zeros(1, dtype=torch.float64), rates[order].cumsum(0)])  # of S before each start
    ends = torch.cat([times, torch.tensor([last], dtype=torch.float64)])
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.float64))
    reached = (speed * lengths.nan_to_num(posinf=0.0)).cumsum(0)  # S at each of the ends
    if math.isinf(last):
        reached[-1] = math.inf
    above = 1.0 + torch.cat([torch.zeros(1, dtype=torch.float64), reached[:-1]])
    parts = torch.where(
        (1.0 + reached).isinf(), 1.0 / (above * speed.clamp_min(1e-300)), lengths / (above * (1.0 + reached))
    )
    left = parts.flip(0).cumsum(0).flip(0)[1:]  # of the integral, from each start to the end
    law = torch.zeros_like(after)
    found = torch.empty_like(rates)
    found[order] = rates[order] * left
    law[possible] = found.to(law.device)
    law[token] = 0.0 if math.isinf(last) else 1.0 / (1.0 + float(reached[-1]))
    return law


@dataclass(slots=True)
class _Counted:
    """Answers of a broken stack so far."""

    tokens: int = 0
    others: int = 0  # that are not the target's choice
    answers: int = 0
    differing: int = 0

    @property
    def size(self) -> float:
        return self.others / max(1, self.tokens)

    @property
    def detectable(self) -> float:
        """Share of wrong tokens of which one would have been among these with probability `POWER`."""
        return min(1.0, -math.log(1.0 - POWER) / max(1, self.tokens))

    @property
    def strong(self) -> bool:
        return self.size >= TIMES_DETECTABLE * self.detectable


def _show(
    control: Control, broken: Stack, stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Finding:
    counted = _Counted()
    for number in range(_ROUNDS):
        # Later rounds begin behind more of each prompt's plain answer, so that greedy texts are new, too.
        _compare(counted, broken, stack, prompts, replace(params, seed=number * len(prompts)))
        if counted.strong and counted.differing:
            break
        prompts = [_longer(stack, prompt) for prompt in prompts]
    caught = counted.strong and counted.differing > 0
    said = f"{counted.size:.1%} of {counted.tokens} tokens are not the target's choice, {control.words}"
    if caught:
        status = Status.HOLDS
        verdict = f"found, as it must be: {counted.differing} of {counted.answers} answers differ"
    elif counted.differing:
        status, verdict = Status.NOT_ENOUGH, "found, but too small to count: give more prompts"
    else:
        status, verdict = Status.FAILS, "NOT found: this comparison cannot be trusted here"
    facts = {
        "total_variation": counted.size,
        "smallest_detectable_tv": counted.detectable,
        "tokens": counted.tokens,
        "answers": counted.answers,
        "differing_answers": counted.differing,
        "setting": control.words,
    }
    return Finding(Part.CONTROLS, control.name, status, f"{verdict}; {said}", facts)


def _longer(stack: Stack, prompt: Sequence[int]) -> list[int]:
    """A prompt and some of what the target says behind it, as long as there is room for an answer."""
    if len(prompt) + 2 * _TOKENS >= stack.target.context_length:
        return list(prompt)
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    return [*prompt, *stack.plain(1).generate(list(prompt), params).token_ids]


def _compare(
    counted: _Counted, broken: Stack, stack: Stack, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    """Answer prompts by a broken stack and plainly, and count what differs."""
    options = [
        replace(
            params,
            seed=(params.seed or 0) + number,
            max_tokens=min(_TOKENS, stack.target.context_length - len(prompt)),
            ignore_eos=True,
            stop=(),
            stop_token_ids=(),
        )
        for number, prompt in enumerate(prompts)
    ]
    asked = [list(prompt) for prompt in prompts]
    wrong = [answer.token_ids for answer in broken.engine(len(prompts)).generate(asked, options)]
    right = [answer.token_ids for answer in stack.plain(len(prompts)).generate(asked, options)]
    for prompt, answer, expected, own in zip(asked, wrong, right, options, strict=True):
        counted.tokens += len(answer)
        choices = target_choices(stack, prompt, answer, own)
        counted.others += sum(mine != theirs for mine, theirs in zip(answer, choices, strict=True))
        counted.answers += 1
        counted.differing += answer != expected


def target_choices(stack: Stack, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams) -> list[int]:
    """The target's choice at every place of an answer, by plain forwards over it.

    Args:
        stack: with the target.
        prompt: token ids.
        answer: tokens behind it.
        params: greedy, or coupled with a seed.
    """
    if params.greedy:
        (logits,) = plain_logits(stack.target, [(prompt, answer)])
        choices: list[int] = coupled_choice(logits, None).tolist()
        return choices
    assert params.seed is not None
    (laws,) = plain_laws(stack.target, [(prompt, answer)], params)
    noise = KeyedNoise(params.seed, len(prompt), 0)
    rows = [
        coupled_choice(law, noise.gumbel(depth, law.shape[-1], law.device)) for depth, law in enumerate(laws.split(1))
    ]
    chosen: list[int] = torch.cat(rows).tolist()
    return chosen
