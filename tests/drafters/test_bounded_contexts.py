"""Drafts with a bounded context: what they draw from is what the model gives under the mask, and answers stay exact.

The mask of a text: a token sees the first 16 tokens and those from `16 + dropped(position)` on. Drafted tokens see what
the text's last token does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from drafters.heads import test_levels
from kinds.mtp import test_mtp
from support.backends import fused_backend, graph_backend, native_backend
from support.layer_heads import as_transformers_runs_it, noted, target
from support.tiny_models import VOCAB, build, with_noise
from truedraft import Engine, SamplingParams
from truedraft.certify import Stack
from truedraft.certify.certificate import Status
from truedraft.certify.checks import Context
from truedraft.certify.draft_state import DraftState
from truedraft.drafters import DraftModel, Mtp, SelfDraft, from_spec
from truedraft.errors import OptionError, UnknownOptionError
from truedraft.kinds.mtp.module import MtpHead
from truedraft.models.backends.native.build import built
from truedraft.models.backends.sequential import SequentialBackend
from truedraft.models.backends.stock import StockBackend
from truedraft.models.cache import BoundedContext
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.verification import SpeculativeSampling

LONG, SIZE = 512, 128
BOUNDS = BoundedContext(SIZE)
TEXT = [(7 * place * place + 3 * place + 5) % VOCAB for place in range(190)]
PROMPTS = [TEXT[:120], TEXT[:190], TEXT[5:30]]
GREEDY, SEEDED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, seed=4)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8)
BACKENDS: dict[str, Any] = {
    "stock": StockBackend, "fused": fused_backend, "graphs": graph_backend, "native": native_backend,
}  # fmt: skip


def as_it_is(noise: float = 0.0) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=LONG, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = build(config, seed=3)
    return with_noise(made, noise) if noise else made


def model(backend: str = "stock", noise: float = 0.0) -> HuggingFaceModel:
    return HuggingFaceModel(as_it_is(noise), None, "long", BACKENDS[backend])


@torch.inference_mode()
def masked(stock: PreTrainedModel, text: list[int], path: list[int], since: int) -> Tensor:
    """Logits behind a text and drafted tokens, where tokens of the text before `since` see all before them."""
    ids = [*text, *path]
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for place in range(since, len(ids)):
        seen[place, 16 : 16 + BOUNDS.dropped(min(place, len(text) - 1))] = False
    mask = torch.zeros(len(ids), len(ids)).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits: Tensor = stock(input_ids=torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, -1]
    return logits


def assert_drawn_from(drafts: Any, logits: Callable[[list[int], list[int]], Tensor], every: int = 5) -> None:
    depths = set()
    for text, proposal in drafts.drafted[::every]:
        tree = proposal.tree
        for row, draws in enumerate(proposal.draws):
            if draws:
                path = [tree.host_ids[node] for node in tree.shape.path(row - 1)] if row else []
                expected = torch.softmax(logits(text, path).double() / 0.8, -1)
                torch.testing.assert_close(proposal.probs[draws[0].dist].double(), expected, rtol=0, atol=3e-5)
                depths.add((len(text) > SIZE, len(path)))
    assert {(True, 0), (True, 1), (False, 0)} <= depths


_needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)


@pytest.mark.parametrize("backend", [*list(BACKENDS)[:3], pytest.param("native", marks=_needs_library)])
@pytest.mark.parametrize("options", [{}, {"branching": (2, 2)}], ids=["chain", "tree"])
def test_a_draft_model_draws_from_what_it_gives_under_the_mask(backend: str, options: Any) -> None:
    drafts = noted(DraftModel)(model(backend, 0.05), context=SIZE, **options)
    engine = Engine(model(), drafts, controller="fixed", entropy=3)
    most: list[int] = []
    engine.listeners.append(lambda _: most.extend(each.stored for each in drafts.caches.values()))
    engine.generate([list(each) for each in PROMPTS], SAMPLED)
    stock = as_it_is(0.05)
    assert_drawn_from(drafts, lambda text, path: masked(stock, text, path, 0))
    assert SIZE - BOUNDS.step < max(most) <= SIZE and drafts.model.pool.in_use == 0


@pytest.mark.parametrize("make", [
    lambda: DraftModel(model(noise=0.05), context=SIZE), lambda: SelfDraft(own := model(), own, context=SIZE),
], ids=["draft", "self"])  # fmt: skip
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_plain_decoding(make: Callable[[], Any], params: SamplingParams) -> None:
    drafts = make()
    against = getattr(drafts, "_target", None) or model()
    found = Engine(against, drafts, controller="fixed").generate([list(each) for each in PROMPTS], params)
    plain = Engine(model()).generate([list(each) for each in PROMPTS], params)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert sum(each.stats.accepted_tokens for each in found) > 0


@pytest.mark.parametrize("backend", ["stock", pytest.param("native", marks=_needs_library)])
def test_a_self_draft_reads_a_part_of_what_the_target_read(backend: str) -> None:
    """Keys of the text are the target's own, which saw all of it."""
    own = model(backend)
    drafts = noted(SelfDraft)(own, own, context=SIZE)
    Engine(own, drafts, controller="fixed", entropy=3).generate([list(each) for each in PROMPTS], SAMPLED)
    stock = as_it_is()
    assert_drawn_from(drafts, lambda text, path: masked(stock, text, path, len(text) - 1))
    assert own.pool is not None and own.pool.in_use == 0


HEADS = ["EAGLE-3, fewer ids", "P-EAGLE", "DFlash", "DSpark, fewer ids", "EAGLE-3, window and first tokens"]


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_heads_draw_from_what_the_page_gives_under_the_mask(name: str) -> None:
    """Pair and context row i of a text of n tokens is at position i, and the last one at n - 2."""
    made = test_levels.head(name)
    drafts, page = test_levels.drafter(made, context=SIZE), test_levels.page(made)
    engine = Engine(target(), drafts, controller="fixed", entropy=3)
    stored: list[int] = []
    engine.listeners.append(lambda _: stored.extend(each.stored for each in drafts._shared.caches.values()))
    params = SamplingParams(max_tokens=24, temperature=0.8)
    engine.generate([list(each) for each in PROMPTS], params)

    def logits(text: list[int], path: list[int]) -> Tensor:
        page.dropped = lambda place: BOUNDS.dropped(min(place, len(text) - 2))
        found: Tensor = page.logits(text, path)
        return found

    assert_drawn_from(drafts, logits, every=11)
    assert 64 < max(stored) <= SIZE and drafts._running[0].pool.in_use == 0
    plain = Engine(target()).generate([list(each) for each in PROMPTS], SEEDED)
    seeded = Engine(target(), test_levels.drafter(made, context=SIZE), controller="fixed")
    found = seeded.generate([list(each) for each in PROMPTS], SEEDED)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3"])
@torch.inference_mode()
def test_mtp_layers_draft_as_fresh_ones(name: str, tmp_path: Path) -> None:
    own = test_mtp.loaded(test_mtp.reference(name).write(tmp_path))
    drafts = Mtp(MtpHead.for_target(None, own), context=SIZE)
    texts = [[(7 * place * place + 1) % own.vocab_size for place in range(length)] for length in (118, 185)]
    (found,) = DraftState().run(Context(Stack(own, drafts, SpeculativeSampling()), texts, SamplingParams(24), 2))
    assert found.status is Status.HOLDS and found.facts["compared"] > 10 and found.facts["different"] == 0


def reserved(make: Callable[[Any, int | None], Any], size: int | None) -> int:
    """Most bytes that an engine with a limit reserves; never less than what the drafter holds."""
    own = model()
    drafts = make(own, size)
    engine, granted = Engine(own, drafts, controller="fixed", max_cache_bytes=1 << 24), [0]

    def compare(_: object) -> None:
        granted.append(engine._memory._reserved)
        assert drafts.held.n_bytes <= granted[-1]

    engine.listeners.append(compare)
    assert not engine.generate(list(TEXT), SamplingParams(max_tokens=24)).warnings
    assert engine.check_idle() == []
    return max(granted)


@pytest.mark.parametrize("make", [
    lambda own, size: DraftModel(model(noise=0.05), context=size),
    lambda own, size: test_levels.drafter(test_levels.head("DFlash", width=64, heads=2, head=32), context=size),
], ids=["draft", "DFlash"])  # fmt: skip
def test_less_memory_is_reserved(make: Callable[[Any, int | None], Any]) -> None:
    assert reserved(make, SIZE) < reserved(make, None)


def test_copies_for_a_self_draft_are_reserved_too() -> None:
    assert reserved(lambda own, size: SelfDraft(own, own, context=size), SIZE) > reserved(
        lambda own, size: SelfDraft(own, own, context=size), None
    )


def test_bad_contexts_are_refused_in_a_sentence() -> None:
    with pytest.raises(OptionError, match="context must be a whole number of 128 or more, got 100"):
        DraftModel(model(), context=100)
    alone = HuggingFaceModel(as_transformers_runs_it(), None, "alone", SequentialBackend)
    with pytest.raises(OptionError, match="those of alone cannot drop tokens; leave it out"):
        DraftModel(alone, context=SIZE)
    with pytest.raises(UnknownOptionError, match="context"):
        from_spec("prompt-lookup,context=1024", model())
