"""What requests begin with alike is read once, by the target and by heads, and drafts stay what they are without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads import test_levels, test_recorded_drafts
from kinds.mtp import test_mtp
from support.backends import HostRecorder
from support.layer_heads import Records, on_all_backends, target
from support.tiny_models import VOCAB
from truedraft import Engine, SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import Portfolio, PromptLookup
from truedraft.drafters.heads.texts import PairTokens
from truedraft.kinds.mtp.module import MtpHead

SYSTEM = [(7 * place * place + 3 * place + 5) % VOCAB for place in range(150)]
PARAMS = SamplingParams(max_tokens=12)
KEPT = 1 << 24
HEADS: dict[str, Callable[[], Any]] = {
    name: partial(lambda own: test_levels.drafter(test_levels.head(own), nodes=3), name)
    for name in ("EAGLE-3", "P-EAGLE", "DFlash", "DSpark", "recurrent", "DFlash 2")
}


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams = PARAMS, **options: Any) -> Any:
    """A request that is over."""
    request = engine.submit(list(prompt), params, **options)
    while not request.closed:
        engine.step()
    return request


def answer(request: Any) -> list[int]:
    found: list[int] = request.tokens[request.prompt_tokens :]
    return found


def turns(engine: Engine) -> tuple[list[int], list[list[int]]]:
    """Two turns of a conversation behind a system prompt, and another one behind it: copied tokens, and answers."""
    copied, answers, text = [], [], [*SYSTEM, 1, 2]
    for new in ([], [3, 4, 5]):
        text = [*text, *new]
        request = run(engine, text)
        copied.append(request.copied_tokens)
        answers.append(answer(request))
        text += answers[-1]
    other = run(engine, [*SYSTEM, 9, 9, 9, 9])
    return [*copied, other.copied_tokens], [*answers, answer(other)]


def drafts(drafter: Records) -> list[tuple[list[int], list[int], tuple[int, ...]]]:
    def told(text: list[int], own: Proposal) -> tuple[list[int], list[int], tuple[int, ...]]:
        return text, own.tree.host_ids, own.tree.shape.parents

    return [told(*each) for each in drafter.drafted]


@on_all_backends
@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_later_turns_are_drafted_for_as_from_the_beginning(name: str, backend: str) -> None:
    if backend == "alone":
        pytest.skip("of models that run one text at a time nothing is shared by another than their own cache")
    model, sharing, alone = target(backend), HEADS[name](), HEADS[name]()
    copied, answers = turns(Engine(model, sharing, controller="fixed", prefix_cache_bytes=KEPT))
    plain, expected = turns(Engine(model, prefix_cache_bytes=KEPT))
    assert answers == expected == turns(Engine(model, alone, controller="fixed", prefix_cache_bytes=0))[1]
    assert copied == plain and copied[1:] == [128, 128]
    assert drafts(sharing) == drafts(alone) and len(drafts(sharing)) > 10


@pytest.mark.parametrize("name", ["EAGLE-3", "P-EAGLE, fewer ids", "DFlash", "recurrent", "DFlash 2"])
@torch.inference_mode()
def test_pages_of_recorded_heads_are_shared_and_all_given_back(name: str) -> None:
    model = target("graphs")
    sharing, alone = (test_recorded_drafts.drafter(name, HostRecorder()) for _ in range(2))
    limits: dict[str, Any] = {"max_cache_bytes": 1 << 23, "max_batch": 4, "controller": "fixed"}
    engine = Engine(model, sharing, prefix_cache_bytes=1 << 20, **limits)
    copied, answers = turns(engine)
    assert copied == [0, 128, 128]
    assert answers == turns(Engine(model, alone, controller="fixed", prefix_cache_bytes=0))[1]
    assert drafts(sharing) == drafts(alone) and len(drafts(sharing)) > 10
    assert engine.check_idle() == [] and sharing._running[0].pool.in_use == 0
    engine = Engine(model, sharing, prefix_cache_bytes=1 << 18, **limits)
    for start in range(12):  # what is kept goes, block by block, of target and head alike
        run(engine, [start, *SYSTEM])
    kept = [store.n_bytes for store in engine._sharing.stores]
    assert all(kept) and sum(kept) <= 1 << 18
    assert run(engine, [11, *SYSTEM, 3]).copied_tokens >= 64, "both keep the same texts"


@pytest.mark.parametrize("name", test_mtp.SHAPES)
@torch.inference_mode()
def test_mtp_layers_share_too(name: str, tmp_path: Path) -> None:
    model = test_mtp.loaded(test_mtp.reference(name).write(tmp_path))
    sharing, alone = (test_mtp.Recorded(MtpHead.for_target(None, model)) for _ in range(2))
    copied, answers = turns(Engine(model, sharing, controller="fixed", prefix_cache_bytes=KEPT))
    assert (copied, answers) == turns(Engine(model, prefix_cache_bytes=KEPT))
    assert max(copied) == (0 if model.pool is not None and model.pool.carries else 128)  # states are kept each 256
    turns(Engine(model, alone, controller="fixed", prefix_cache_bytes=0))
    assert drafts(sharing) == drafts(alone) and drafts(sharing)


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_samples_of_one_prompt_read_it_once(name: str) -> None:
    """Those that wait copy what the first one has read, which drafts on all the same."""
    sharing, alone = HEADS[name](), HEADS[name]()
    prompts = [[*SYSTEM, 1], [*SYSTEM, 2, 3], [*SYSTEM[:100], 4]]
    engine = Engine(target(), sharing, controller="fixed")
    requests = [engine.submit(prompt, PARAMS) for prompt in prompts]
    while engine.step():
        pass
    cold = Engine(target(), alone, controller="fixed", prefix_cache_bytes=0)
    assert [answer(each) for each in requests] == [each.token_ids for each in cold.generate(prompts, PARAMS)]
    before = 1 if sharing._reads_pairs else 0  # the pair of the last equal token has another token behind it
    assert [each.copied_tokens for each in requests[1:]] == [len(SYSTEM) - before, 100 - before]
    assert sorted(drafts(sharing)) == sorted(drafts(alone))


@torch.inference_mode()
def test_scopes_share_no_head_and_other_weights_none_of_the_old() -> None:
    drafter = HEADS["EAGLE-3"]()
    engine = Engine(target(), drafter, controller="fixed", prefix_cache_bytes=KEPT)
    copied = [run(engine, SYSTEM, scope=scope).copied_tokens for scope in ("a", "b", "a")]
    assert copied == [0, 0, 128]
    drafter.take(test_levels.head("EAGLE-3"))
    assert run(engine, SYSTEM, scope="b").copied_tokens == 0, "the head has to see what it has not read"
    assert run(engine, SYSTEM, scope="b").copied_tokens == 128


@torch.inference_mode()
def test_what_a_head_forgot_is_computed_again() -> None:
    sharing, alone = HEADS["DFlash"](), HEADS["DFlash"]()
    engine = Engine(target(), Portfolio([sharing, PromptLookup()]), controller="fixed", prefix_cache_bytes=KEPT)
    run(engine, SYSTEM)
    sharing._shared.prefixes.forget_oldest()  # its last block
    request = run(engine, [*SYSTEM, 8])
    assert request.copied_tokens == 64
    assert engine.check_idle() == []
    rest = [each for each in drafts(sharing) if each[0][: len(SYSTEM) + 1] == [*SYSTEM, 8]]
    run(Engine(target(), Portfolio([alone, PromptLookup()]), controller="fixed", prefix_cache_bytes=0), [*SYSTEM, 8])
    assert rest and rest == drafts(alone)[-len(rest) :]


@torch.inference_mode()
def test_a_failing_reader_costs_no_answer() -> None:
    drafter = HEADS["DFlash"]()
    engine = Engine(target(), drafter, controller="fixed", prefix_cache_bytes=KEPT)
    drafter._shared._read = lambda *_: 1 / 0
    prompts = [[*SYSTEM, 1], [*SYSTEM, 2, 3]]
    plain = [each.token_ids for each in Engine(target()).generate(prompts, PARAMS)]
    assert [each.token_ids for each in engine.generate(prompts, PARAMS)] == plain
    drafter._shared.prefixes.fill = lambda *_, **__: 1 / 0
    assert answer(run(engine, SYSTEM)) == answer(run(Engine(target()), SYSTEM))
    assert engine.check_idle() == []


def test_pairs_stand_under_the_token_behind() -> None:
    text = [5, 6, 7]
    pairs = PairTokens(text)
    assert (pairs[0], pairs[-1], pairs[:], pairs[1:2], len(pairs)) == (6, -1, [6, 7, -1], [7], 3)
    text.append(8)
    assert pairs[:] == [6, 7, 8, -1] and pairs[2:9] == [8, -1]
