"""Certificates that are themselves broken, one line at a time, must stop seeing what sound ones see.

Each mutant has a sight: something that a sound `truedraft.certify` says of a stack that is wrong, or of a fault that is
none. It is checked twice, as the package is and with the line changed. Were the line ever written as in the mutant, the
first check would fail; and a sight that does not hang on its line fails the second, so none is there for show.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from certify.planted_faults import (
    HARMLESS,
    TEXTS,
    StaleDraft,
    borrowed,
    gives_up,
    healthy,
    markov,
    row_noise,
    said_of_tokens,
    third_at,
    wrong_mask,
)
from support.broken_rules import DrawsFromTarget
from support.virtual_time import VirtualTime
from truedraft import Engine, SamplingParams
from truedraft.certify import (
    controls,
    draft_state,
    e_process,
    equality,
    exact,
    faults,
    invariance,
    report,
    rounding,
    statistics,
)
from truedraft.certify.checks import Check, Context, Deadline, Finding, Part, Stack, Status
from truedraft.drafters import DraftModel, NoDrafter
from truedraft.engine import verifier
from truedraft.verification import SpeculativeSampling

GREEDY = SamplingParams(max_tokens=16)
WARM = SamplingParams(max_tokens=16, temperature=1.0)
SEEDED = SamplingParams(max_tokens=16, temperature=1.0, seed=1)


def accepting() -> Stack:
    """Greedy and seeded requests get whatever was drafted."""
    return Stack(markov(0), DraftModel(markov(3), 3), SpeculativeSampling(), faults.coupled_accepts_always())


# ------------------------------------------------------------------------------- what a sound certificate sees


def run(check: Check, stack: Stack, params: SamplingParams = GREEDY, batch: int = 4, **options: Any) -> list[Finding]:
    return check.run(Context(stack, TEXTS, params, batch, **options))


def only(findings: Sequence[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def greedy_control(plant: Callable[[Stack], Stack], tokens: int = 32) -> Finding:
    """What the comparison of greedy answers says of one planted fault, in one round."""
    guesses = faults.next_id(markov(0).vocab_size)
    fault = faults.Fault("planted", plant=lambda stack: plant(controls.drafting_one(stack, guesses)))
    return run(controls.ComparedControls([fault], rounds=1, tokens=tokens), healthy())[0]


def fails(found: Callable[[], Finding], status: Status = Status.FAILS) -> Callable[[], bool]:
    return lambda: found().status is status


def harmless_control() -> Finding:
    """What is said of a plant that does nothing, though the tests of sampled answers take it for a large fault."""
    return run(
        controls.SampledControls([HARMLESS]), healthy(), WARM, seconds=600.0, earlier=[said_of_tokens(tokens=300)]
    )[0]


def small_control() -> Finding:
    said = {"tokens": 5000, "smallest_detectable_tv": 0.03, "false_alarm": 1e-3}
    return controls.Shown(5000, 0.05, 1e-9, "a test", "", said).finding("a fault")


def equal(stack: Stack, name: str, params: SamplingParams = GREEDY) -> Finding:
    return only(run(equality.Equality(), stack, params), f"{name}, float32")


def no_time_is_no_evidence(check: Check) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        VirtualTime(patch, step_s=1.0)
        return Status.NOT_ENOUGH in {finding.status for finding in run(check, healthy(), seconds=1.0)}


def broken_mask() -> Stack:
    tree = DraftModel(markov(0, astray=1.0), branching=(2, 2))
    return Stack(row_noise(wrong_mask(markov(0)), 1e-3), tree, SpeculativeSampling())


def sampled(stack: Stack) -> Finding:
    """What the tests of tokens say, after as many as a virtual minute gives; four requests together."""
    with pytest.MonkeyPatch.context() as patch:
        VirtualTime(patch, step_s=0.2)
        patch.setattr(statistics, "joint_result", lambda *_, **__: None)
        return run(statistics.Statistics(), stack, WARM, seconds=12.0)[0]


def one_request_of_four() -> Finding:
    """Judged by a sound target: a broken one must not judge itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "scored_answers", partial(statistics.scored_answers, judge=markov(0)))
        return sampled(Stack(third_at(5.0), NoDrafter(), SpeculativeSampling()))


def joint_distributions_are_judged() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        VirtualTime(patch, step_s=0.1)
        stack = healthy().but(rule=faults.accepts_always(SpeculativeSampling()))
        found = statistics.joint_result(Context(stack, TEXTS, WARM), Deadline(5.0), lambda done: None)
        return found is not None and found.p_value < 1e-6


def asked(stack: Stack, name: str, params: SamplingParams = GREEDY, batch: int = 4) -> Finding:
    return only(run(invariance.Invariance(), stack, params, batch), name)


def borrowed_options(name: str, batch: int) -> Finding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "batch_probs", borrowed)
        return asked(healthy(), name, WARM, batch)


def lost_pieces() -> Finding:
    stream = Engine.stream

    def losing(engine: Engine, *arguments: Any, **more: Any) -> object:
        yield from (piece for n, piece in enumerate(stream(engine, *arguments, **more)) if n != 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "stream", losing)
        return asked(healthy(), "streamed")


def stale(fact: str) -> bool:
    """Whether this is said of a draft whose caches are stale."""
    drafter = StaleDraft(markov(0, astray=0.8), branching=(3, 2, 1))
    stack = Stack(markov(0), drafter, SpeculativeSampling())
    context = Context(stack, TEXTS[:2], SamplingParams(max_tokens=24), 2)
    return draft_state.DraftState().run(context)[0].facts[fact] > 0


def exactly(rule: SpeculativeSampling, name: str) -> Finding:
    return only(run(exact.Exact(), healthy().but(rule=rule), WARM), name)


class ServesAnother(SpeculativeSampling):
    """Its kernel is right, and what it ships accepts always."""

    def accept(self, proposals, probs, noise):  # type: ignore[no-untyped-def]
        return faults.accepts_always(SpeculativeSampling()).accept(proposals, probs, noise)


def not_issued(status: Status) -> bool:
    return not report.Report("", [Finding(Part.EXACT, "a check", status, "")], "").issued


idle_plant = fails(lambda: greedy_control(lambda stack: stack))
few_tokens = fails(
    lambda: greedy_control(lambda stack: stack.but(coupled_rule=faults.coupled_accepts_always()), tokens=3),
    Status.NOT_ENOUGH,
)
together = fails(lambda: equal(accepting(), "greedy, batch 4"))
alone = fails(lambda: equal(accepting(), "greedy, batch 1"))
third = fails(lambda: equal(Stack(third_at(5.0), NoDrafter(), SpeculativeSampling()), "seeded, batch 4", SEEDED))
gave_up = fails(lambda: run(equality.Equality(), healthy().but(drafter=gives_up()), batch=1)[-1])
among_roundings = fails(lambda: equal(accepting().but(target=row_noise(markov(0), 1e-3)), "greedy, batch 4"))
accepting_sampled = fails(lambda: sampled(healthy().but(rule=faults.accepts_always(SpeculativeSampling()))))
neighbours = fails(lambda: borrowed_options("in a batch of 4", 4))
budgets = fails(lambda: asked(accepting(), "without drafting"))
wrong_kernel = fails(lambda: exactly(DrawsFromTarget(), "kernel"))
wrong_code = fails(lambda: exactly(ServesAnother(), "batched code, every decision cell"))

# ---------------------------------------------------------------------------------------------- broken certificates

GREEDY_CAUGHT = "self.strong and self.comparison.untraced > 0"
SAMPLED_CAUGHT = "caught, detectable = self.strong and self.found,"
ANSWERS = "zip(numbers, expected, found, strict=True)"
TOO_FEW = "self.answers < least or not self.compared"
ISSUED = "not self.lossy and not self.failures and not self.undecided"

MUTANTS = [
    # module, code, what stands in its place, what is not seen any more
    (controls, GREEDY_CAUGHT, "True", idle_plant),
    (controls, GREEDY_CAUGHT, "self.comparison.untraced > 0", few_tokens),
    (
        controls,
        "counted.comparison.add(right[number],",
        "counted.comparison.add(replace(right[number], finish_reason=''),",
        idle_plant,
    ),
    (controls, SAMPLED_CAUGHT, "caught, detectable = True,", fails(harmless_control)),
    (controls, SAMPLED_CAUGHT, "caught, detectable = self.strong,", fails(harmless_control)),
    (controls, SAMPLED_CAUGHT, "caught, detectable = self.found,", fails(small_control, Status.NOT_ENOUGH)),
    (equality, "found = answers(engines[size], numbers)", "found = expected", together),
    (equality, ANSWERS, "()", alone),
    (equality, ANSWERS, f"list({ANSWERS})[:2]", third),
    (equality, "{size: context.stack.engine(size)", "{size: context.stack.plain(size)", together),
    (equality, "if faults or failures else", "if faults else", gave_up),
    (equality, TOO_FEW, "False", partial(no_time_is_no_evidence, equality.Equality())),
    (equality, TOO_FEW, "False", partial(no_time_is_no_evidence, invariance.Invariance())),
    (equality, "if margin > 2.0 * allowed:", "if False:", among_roundings),
    (
        rounding,
        "self.plain_difference <= self.limit and self.from_nearest_plain <= _LEEWAY * self.plain_difference",
        "True",
        fails(lambda: equal(broken_mask(), "rounding")),
    ),
    (statistics, "adjusted[smallest] < FALSE_ALARM or impossible", "False", accepting_sampled),
    (e_process, "self._logs[row] += (ratio * about).sum(dim=0)", "pass", accepting_sampled),
    (
        statistics,
        "                tests.add(scored)\n            context.tell(",
        "                tests.add(scored) if scored.place != 2 else None\n            context.tell(",
        fails(one_request_of_four),
    ),
    (statistics, "math.exp(-max(log_dirichlet(self.counts, self.probs), 0.0))", "1.0", joint_distributions_are_judged),
    (invariance, "for place in which:", "for place in ():", neighbours),
    (
        invariance,
        "together = max(context.batch, _LEAST_TOGETHER)",
        "together = context.batch",
        fails(lambda: borrowed_options("cancelled and asked again", 1)),
    ),
    (
        invariance,
        "self._comparisons[name].add(expected, found, context",
        "self._comparisons[name].add(found, found, context",
        budgets,
    ),
    (invariance, '"without drafting": FixedBudget(NO_DRAFT)', '"without drafting": FixedBudget(self._limits)', budgets),
    (
        invariance,
        "return expected + 6.0 * math.sqrt(expected) + 3.0 if expected else 0.0",
        "return math.inf",
        neighbours,
    ),
    (invariance, "return replace(answer, token_ids=tokens)", "return answer", fails(lost_pieces)),
    (
        draft_state,
        "trees[0].host_ids != trees[1].host_ids or trees[0].shape != trees[1].shape",
        "False",
        partial(stale, "different"),
    ),
    (
        draft_state,
        "sum(beyond_rounding for _, beyond_rounding in self.caches)",
        "0",
        partial(stale, "caches_different"),
    ),
    (exact, "worlds = worlds_for(own)", "worlds = worlds_for(own)[:0]", wrong_kernel),
    (exact, "Status.HOLDS if distance < TOLERANCE else Status.FAILS", "Status.HOLDS", wrong_kernel),
    (exact, "return not self.distance < TOLERANCE", "return False", wrong_code),
    (report, ISSUED, "not self.lossy and not self.undecided", partial(not_issued, Status.FAILS)),
    (report, ISSUED, "not self.lossy and not self.failures", partial(not_issued, Status.NOT_ENOUGH)),
]


def plant(module: types.ModuleType, code: str, instead: str, patch: pytest.MonkeyPatch) -> None:
    """Run the module with the code changed, and put what it defines in the place of the original, in all of certify."""
    file = module.__file__
    assert file is not None
    source = Path(file).read_text()
    assert source.count(code) == 1, f"{code!r} is not once in {file}: write the mutant anew"
    changed = types.ModuleType(module.__name__)
    exec(compile(source.replace(code, instead), file, "exec"), changed.__dict__)
    own = {
        id(value): vars(changed)[name]
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and name in vars(changed)
    }
    for each in [each for name, each in sys.modules.items() if name.startswith("truedraft.certify")]:
        for name, value in list(vars(each).items()):
            if id(value) in own:
                patch.setattr(each, name, own[id(value)])


@pytest.mark.parametrize(
    ("module", "code", "instead", "sight"), MUTANTS, ids=[f"{each[2]} in {each[1]}" for each in MUTANTS]
)
def test_a_broken_certificate_does_not_see_what_a_sound_one_sees(
    module: types.ModuleType, code: str, instead: str, sight: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sight(), "a sound certificate"
    plant(module, code, instead, monkeypatch)
    assert not sight(), "with the code changed"
