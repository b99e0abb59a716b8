"""On a device the host waits once in a step. Shown on the CPU by a stand-in, and on CUDA by the driver's own word.

The stand-in makes the code believe that reading a tensor waits. Then all reading must go through one door, which is
counted; every other way to bring a number to the host is refused while a step runs. Answers must be those of the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from support import fixed_noise
from support.answers import fixed
from support.backends import graph_backend
from support.head_models import random_heads, random_redrafter
from support.recorded_heads import RecordedMedusa, Waitless
from support.tiny_models import PROMPTS, VOCAB, noisy_stock, stock
from truedraft import Engine, SamplingParams
from truedraft.core import transfers
from truedraft.core.probs import nucleus_by_sorting
from truedraft.core.proposal import Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.core.tree import TokenTree
from truedraft.drafters import Drafter, DraftModel, Lookahead, Medusa, PromptLookup, Redrafter
from truedraft.engine import Answer
from truedraft.engine.scheduler import FixedParts
from truedraft.engine.step import Step
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.testing import ScriptedDrafter
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling
from truedraft.verification.rule import BatchVerdicts

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8)
NUCLEUS = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9)
SEEDED = SamplingParams(max_tokens=22, temperature=0.8, top_k=20, seed=5)
BATCHES = {
    "greedy": [GREEDY] * 3,
    "sampled": [SAMPLED] * 3,
    "seeded": [SEEDED] * 3,
    "mixed": [NUCLEUS, GREEDY, SEEDED, SAMPLED],
    "alone": [NUCLEUS],
}
PROMPT_IDS = [list(prompt) for prompt in PROMPTS]


class Standin:
    """The CPU taken for a device; counts steps, and what goes through the door in them."""

    READS = ("tolist", "item", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__array__")
    HOST_BLOCKS = ("truedraft.models.backends.graphs.batch",)
    """Fills a block of the host before it goes up."""

    def __init__(self, patch: pytest.MonkeyPatch, lenient: Sequence[str] = ()) -> None:
        self.fetches: list[int] = []  # by step
        self.other_reads = 0
        self._in_step = self._at_the_door = False
        self._allowed = (*self.HOST_BLOCKS, *lenient)
        patch.setattr(transfers, "waits", lambda device: True)
        for module in ("core.probs", "drafters.draws"):
            patch.setattr(f"truedraft.{module}.likeliest", lambda scores: scores.max(dim=-1))
        patch.setattr("truedraft.core.probs.keep_nucleus", nucleus_by_sorting)
        fetch, run = transfers.fetch, Step.run

        def through_the_door(tensors: Sequence[Tensor]) -> list[list[float]]:
            self._at_the_door = True
            self.fetches[-1] += 1
            try:
                return fetch(tensors)
            finally:
                self._at_the_door = False

        def watched(step: Step, *args: Any) -> Any:
            self.fetches.append(0)
            self._in_step = True
            try:
                with Waitless():
                    return run(step, *args)
            finally:
                self._in_step = False

        patch.setattr(transfers, "fetch", through_the_door)
        patch.setattr(Step, "run", watched)
        for name in self.READS:
            patch.setattr(Tensor, name, self._refusing(name, getattr(Tensor, name)))

    def _refusing(self, name: str, original: Any) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if self._in_step and not self._at_the_door:
                caller = sys._getframe(1).f_globals["__name__"]
                if caller not in self._allowed:
                    raise AssertionError(f"{caller} reads a tensor by {name} outside the door")
                self.other_reads += caller not in self.HOST_BLOCKS
            return original(tensor, *args, **options)

        return read


@contextmanager
def standing_in(*lenient: str) -> Iterator[Standin]:
    with pytest.MonkeyPatch.context() as patch:
        yield Standin(patch, lenient)


def model(family: str = "llama", noise: float | None = None) -> HuggingFaceModel:
    """A small model over pages, as on a GPU; nothing is recorded on the CPU."""
    module = stock(family) if noise is None else noisy_stock(family, noise)
    return HuggingFaceModel(module, None, family, graph_backend)


def medusa(target: HuggingFaceModel, kind: type[Medusa] = Medusa) -> Medusa:
    """Heads that read the token too; on a device their guesses are not looked at before they are judged."""
    heads = random_heads(target, heads=3, layers=2, reads_token=True, spread=0.05)
    tree = RankTree.cartesian((3, 2, 1))
    return kind(heads, {"greedy": tree, "sampled": tree.first(7)}, nodes=len(tree))


DRAFTERS: dict[str, Callable[[HuggingFaceModel], Drafter | None]] = {
    "plain": lambda target: None,
    "chain": lambda target: DraftModel(model(noise=0.1), 3),
    "one token": lambda target: DraftModel(model(noise=0.1), 1),
    "itself": lambda target: DraftModel(model(), 4),
    "prompt lookup": lambda target: PromptLookup(min_ngram=1),
    "medusa": medusa,
    "recorded medusa": lambda target: medusa(target, RecordedMedusa),
    "candidates": lambda target: ScriptedDrafter(lambda tokens: [[7, tokens[-1]], [3], [tokens[0], 5, 9]]),
}


def likeliest(target: HuggingFaceModel, kind: type[Medusa] = Medusa) -> Medusa:
    """Trees that the heads' own probabilities choose at each step, which the host must see."""
    return kind(medusa(target).head, GuessTrees(3), nodes=9)


def recorded_likeliest(target: HuggingFaceModel) -> Medusa:
    return likeliest(target, RecordedMedusa)


def beams(target: HuggingFaceModel) -> Redrafter:
    """Beams of a recurrent head; drawn ones, as for coupled requests, are looked at once a level."""
    return Redrafter(random_redrafter(target, state=24, spread=0.5), beams=4, nodes=8, sampled=False)


def told(answers: Sequence[Answer]) -> list[tuple[Any, ...]]:
    return [(a.token_ids, a.finish_reason, a.error, a.origins, a.stats, a.warnings) for a in answers]


def answers_of(engine: Engine, params: Sequence[SamplingParams]) -> list[Answer]:
    return fixed_noise.answers_of(engine, PROMPT_IDS[: len(params)], params)


def as_on_the_cpu(
    make: Callable[[], Engine], params: Sequence[SamplingParams], *lenient: str
) -> tuple[Standin, list[int], list[Answer]]:
    """Answers on the stand-in, which must be those of the CPU; and the drafted nodes of its steps."""
    expected, nodes = told(answers_of(make(), params)), list[int]()
    with standing_in(*lenient) as standin:
        engine = make()
        engine.listeners.append(lambda step: nodes.append(step.nodes))
        answers = answers_of(engine, params)
    assert told(answers) == expected
    return standin, nodes, answers


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_fetch_a_step_and_the_answers_of_the_cpu(drafter: str, batch: str) -> None:
    target = model()
    standin, nodes, answers = as_on_the_cpu(lambda: fixed(target, DRAFTERS[drafter](target)), BATCHES[batch])
    assert standin.fetches == [1] * len(nodes)
    assert len(nodes) >= 24 // 5
    assert (sum(nodes) > 0) == (drafter != "plain")
    if drafter in ("chain", "itself"):
        assert sum(answer.stats.accepted_tokens for answer in answers) > 0


@pytest.mark.parametrize(
    ("drafter", "batch"),
    [
        *((each, batch) for each in (likeliest, recorded_likeliest) for batch in BATCHES),
        *((beams, batch) for batch in ("greedy", "sampled", "alone")),
    ],
)
def test_trees_chosen_at_each_step_wait_exactly_once_more(
    drafter: Callable[[HuggingFaceModel], Drafter], batch: str
) -> None:
    """For the heads' probabilities, or the shape of merged beams; a step that drafts nothing waits once."""
    target = model()
    standin, drafted, _ = as_on_the_cpu(lambda: fixed(target, drafter(target)), BATCHES[batch])
    assert standin.fetches == [2 if nodes else 1 for nodes in drafted]
    assert sum(nodes > 0 for nodes in drafted) > len(drafted) // 2


@pytest.mark.parametrize("batch", BATCHES)
def test_windows_wait_once_more_for_what_the_target_says_behind_them(batch: str) -> None:
    """Of all requests together; a step without a window waits once."""
    target = model()
    standin, _, answers = as_on_the_cpu(lambda: fixed(target, Lookahead(3, 3, 2)), BATCHES[batch])
    assert not any(answer.warnings for answer in answers)
    assert set(standin.fetches) == {1, 2}
    assert standin.fetches.count(2) > len(standin.fetches) // 2


@pytest.mark.parametrize("max_batch", [1, 2])
def test_requests_that_come_and_go_and_prompts_in_parts(max_batch: int) -> None:
    """A part of a prompt that gives no row is not waited for at all."""
    target = model()
    long = [(7 * i + 1) % VOCAB for i in range(230)]
    prompts, params = [long, *PROMPT_IDS[1:]], [NUCLEUS, GREEDY, SEEDED, SAMPLED]

    def run() -> list[Answer]:
        engine = fixed(target, DraftModel(model(noise=0.1), 3), max_batch=max_batch, entropy=0)
        engine._scheduler.reading = FixedParts(100)
        return engine.generate(prompts, params)

    expected = told(run())
    with standing_in() as standin:
        assert told(run()) == expected
    assert set(standin.fetches) == {0, 1}
    assert standin.fetches.count(1) > 10


@pytest.mark.parametrize("params", [GREEDY, NUCLEUS, SEEDED], ids=["greedy", "sampled", "seeded"])
@pytest.mark.parametrize("options", [{"branching": (3, 2, 1)}, {"min_probability": 0.2}], ids=["tree", "confident"])
def test_trees_wait_once_more_a_level(options: dict[str, Any], params: SamplingParams) -> None:
    """Their shapes depend on what was drawn; all drawing of a level comes to the host at once."""
    target = model()

    def make() -> Engine:
        return fixed(target, DraftModel(model(noise=0.1), 3, **options))

    standin, *_ = as_on_the_cpu(make, [params] * 2, "truedraft.drafters.draws")
    assert max(standin.fetches) <= 1 + 3
    assert standin.other_reads <= 3 * len(standin.fetches)


def test_a_rule_that_judges_on_the_host_waits_by_itself() -> None:
    class Own(SpeculativeSampling):
        def accept(self, proposals, probs, noise):  # type: ignore[no-untyped-def]
            return BatchVerdicts.made(SpeculativeSampling().verify(proposals, probs, noise))

    target = model()
    expected = told(answers_of(fixed(target, DraftModel(model(noise=0.1), 3)), BATCHES["mixed"]))
    with standing_in() as standin:
        engine = fixed(target, DraftModel(model(noise=0.1), 3), Own())
        assert told(answers_of(engine, BATCHES["mixed"])) == expected
    assert set(standin.fetches) == {2}


@pytest.mark.parametrize("far_one", ["draft", "target"])
def test_draft_and_target_may_lie_apart(far_one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what lies on a device is not looked at; the CPU by its number stands for another device."""
    far = torch.device("cpu", 0)
    target, draft = model(), model(noise=0.1)
    expected = told(answers_of(fixed(target, DraftModel(draft, 3)), BATCHES["mixed"]))
    monkeypatch.setattr(transfers, "waits", lambda device: device == far)
    (draft if far_one == "draft" else target).device = far
    engine = fixed(target, DraftModel(draft, 3))
    assert told(answers_of(engine, BATCHES["mixed"])) == expected


# ------------------------------------------------------------------------------- what may go wrong


class OnDevice(ScriptedDrafter):
    """Its tokens lie on the device, where nobody has looked at them yet."""

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        trees = [proposal.tree for proposal in super().propose(batch, budgets, noise)]
        return [Proposal.deterministic(TokenTree(tree.tokens, tree.shape)) for tree in trees]


@pytest.mark.plants_failures
@pytest.mark.parametrize("params", [GREEDY, NUCLEUS], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [VOCAB, -1, 10**9])
def test_ids_that_do_not_exist_show_after_the_forward_and_cost_only_the_drafting(
    bad: int, params: SamplingParams
) -> None:
    target = model()

    def script(tokens: Sequence[int]) -> list[list[int]]:
        return [[bad, 3], [7]] if tokens[0] == PROMPT_IDS[1][0] and len(tokens) > 42 else [[5, 6]]

    plain = answers_of(Engine(target), [params] * 3)
    drafted = answers_of(fixed(target, ScriptedDrafter(lambda tokens: [[5, 6]])), [params] * 3)
    with standing_in():
        answers = answers_of(fixed(target, OnDevice(script)), [params] * 3)
    for number, answer in enumerate(answers):
        if number == 1:
            assert f"outside 0 to {VOCAB - 1}" in answer.warnings[0]
            assert answer.finish_reason == "length"
        else:
            assert told([answer]) == told([drafted[number]])
    if params.greedy:
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]


class Spoiled(HuggingFaceModel):
    """One row of one forward holds something that is no logit."""

    def __init__(self, call: int, row: int, value: float) -> None:
        super().__init__(stock("llama"), None, "spoiled", graph_backend)
        self._left, self._row, self._value = call, row, value

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        output = super().forward(segments)
        logits = output.logits.clone()
        self._left -= 1
        if self._left == 0:
            logits[min(self._row, len(logits) - 1), 11] = self._value
        return ForwardOutput(logits, output.hidden)


@pytest.mark.parametrize("batch", ["greedy", "sampled", "seeded", "mixed"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_rows_fail_the_same_requests_in_the_same_place(batch: str, value: float) -> None:
    failed = 0
    for row in (0, 1, 3, 5, 9):

        def make(row: int = row) -> Engine:
            return fixed(Spoiled(4, row, value), DraftModel(model(noise=0.05), 3))

        failed += sum(answer.finish_reason == "error" for answer in as_on_the_cpu(make, BATCHES[batch])[2])
    assert failed > 0


class SpoiledDraft(Spoiled):
    """Every third forward of the draft gives nothing but NaN."""

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        output = HuggingFaceModel.forward(self, segments)
        self._left -= 1
        return ForwardOutput(output.logits * (torch.nan if self._left % 3 == 0 else 1.0), output.hidden)


def test_a_draft_without_a_distribution_drafts_stand_ins_that_are_judged_exactly() -> None:
    target = model()
    for params in (GREEDY, SEEDED, SAMPLED):
        plain = [answer.token_ids for answer in answers_of(Engine(target), [params] * 3)]
        with standing_in() as standin:
            engine = fixed(target, DraftModel(SpoiledDraft(0, 0, 0.0), 4))
            answers = answers_of(engine, [params] * 3)
        assert all(answer.finish_reason == "length" and answer.warnings == () for answer in answers)
        assert set(standin.fetches) == {1}
        if params is not SAMPLED:
            assert [answer.token_ids for answer in answers] == plain
            assert all(answer.stats.accepted_tokens for answer in answers)


class FalseProbs(DraftModel):
    """Says of one request, once its text is long enough, that it drew from distributions that are none."""

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        made = super().propose(batch, budgets, noise)
        return [
            Proposal(own.tree, own.draws, own.probs * torch.nan)
            if own.probs is not None and list(request.tokens[:3]) == PROMPT_IDS[1][:3] and len(request.tokens) > 42
            else own
            for request, own in zip(batch, made, strict=True)
        ]


@pytest.mark.plants_failures
@pytest.mark.parametrize("rule", [SpeculativeSampling(), BlockVerification()], ids=["speculative", "block"])
def test_distributions_that_are_none_show_after_the_forward_and_cost_only_the_drafting(rule: Rule) -> None:
    target = model()
    sound = told(answers_of(fixed(target, DraftModel(model(noise=0.1), 3), rule), [SAMPLED] * 3))
    standin, _, answers = as_on_the_cpu(lambda: fixed(target, FalseProbs(model(noise=0.1), 3), rule), [SAMPLED] * 3)
    assert told(answers)[::2] == sound[::2]
    assert answers[1].finish_reason == "length" and "no distributions" in answers[1].warnings[0]
    assert sorted(standin.fetches)[-2:] == [1, 2]  # one proposal was judged again


@pytest.mark.plants_failures
def test_the_standin_notices_other_reads() -> None:
    """Each way to look at a number is refused in a step, and so is what hides in an operation."""

    class Peeks(PromptLookup):
        def __init__(self, look: Callable[[Tensor], object]) -> None:
            super().__init__()
            self._look = look

        def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
            self._look(torch.tensor([1.0, 2.0]))
            return super().propose(batch, budgets, noise)

    looks: list[Callable[[Tensor], object]] = [
        lambda tensor: tensor.tolist(),
        lambda tensor: float(tensor[0]),
        lambda tensor: bool(tensor[0] > 0),
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 1],
    ]
    for look in looks:
        with standing_in():
            answer = fixed(model(), Peeks(look)).generate(PROMPT_IDS[0], GREEDY)
        assert "AssertionError" in "".join(answer.warnings)


# ------------------------------------------------------------------------------- on a real device


def on_cuda(noise: float | None = None, device: str = "cuda") -> HuggingFaceModel:
    module: Any = stock("llama") if noise is None else noisy_stock("llama", noise)
    return HuggingFaceModel(module.to(device), None, "llama", fastest_backend)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("drafter", ["plain", "chain"])
@pytest.mark.parametrize("batch", BATCHES)
def test_on_cuda_nothing_else_waits(drafter: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own word: any wait raises but that at the door. Recording a graph waits, so a first run records."""
    engine = fixed(on_cuda(), DraftModel(on_cuda(0.1), 3) if drafter == "chain" else None)
    expected, _ = answers_of(engine, BATCHES[batch]), answers_of(engine, BATCHES[batch])
    fetch, run, fetches, steps = transfers.fetch, Step.run, list[int](), list[object]()

    def within(mode: str, outside: str, call: Callable[..., Any], *given: Any) -> Any:
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return call(*given)
        finally:
            torch.cuda.set_sync_debug_mode(outside)

    def through_the_door(tensors: Sequence[Tensor]) -> Any:
        fetches.append(len(tensors))
        return within("default", "error", fetch, tensors)

    engine.listeners.append(steps.append)
    monkeypatch.setattr(transfers, "fetch", through_the_door)
    monkeypatch.setattr(Step, "run", lambda step, *given: within("error", "default", run, step, *given))
    answers = answers_of(engine, BATCHES[batch])
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert all(answer.warnings == () for answer in answers)
    assert len(fetches) == len(steps) > 0


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_sampled_answers_are_those_of_the_cpu() -> None:
    """The distribution of a float32 model differs in its last bits between devices, so near the start only."""
    found = []
    for device in ("cpu", "cuda"):
        engine = fixed(on_cuda(None, device), DraftModel(on_cuda(0.1, device), 3))
        answers = answers_of(engine, [SamplingParams(max_tokens=12, temperature=0.8)] * 3)
        found.append([answer.token_ids[:4] for answer in answers])
    assert found[0] == found[1]
