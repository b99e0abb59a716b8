"""What heads with layers of their own draft, held to slow references that are written from the papers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.block_reference import BlockReference
from support.dflash2_reference import DFlash2Reference
from support.eagle_reference import EagleReference, PEagleReference
from support.layer_heads import (
    GREEDY,
    answers_of,
    as_transformers_runs_it,
    noted,
    on_all_backends,
    plain_answers,
    random_head,
    target,
)
from support.tiny_models import CONTEXT, PROMPTS, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import DFlash, DSpark, Eagle3, PEagle, Portfolio, PromptLookup
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.errors import CompositionError, OptionError
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head": 16, "inner": 64, "most_positions": CONTEXT}
EAGLE = Eagle3Config(48, VOCAB, (0, 1), **SIZES, reach=3)
PEAGLE = PEagleConfig(48, VOCAB, (0, 1), **SIZES, reach=3, more_layers=2, mask_token=7)
BLOCK = BlockConfig(48, VOCAB, (0, 1), **SIZES, block=4, mask_id=96, depth=2)
FLASH2 = DFlash2Config(48, VOCAB, (0, 1), **SIZES, block=4, mask_id=96, depth=2, rank=8, candidates=6)
MARKOV: dict[str, Any] = {
    "from_anchor": True, "markov": 8, "confidence": True, "confidence_reads_token": True, "block": 3,
}  # fmt: skip
REDUCED: dict[str, Any] = {"draft_vocab": 40, "own_output": True}
HEADS: dict[str, tuple[Any, Any]] = {
    "EAGLE-3": (Eagle3Head, EAGLE),
    "EAGLE-3, fewer ids": (Eagle3Head, replace(EAGLE, **REDUCED)),
    "P-EAGLE": (PEagleHead, replace(PEAGLE, own_embedding=True)),
    "P-EAGLE, fewer ids": (PEagleHead, replace(PEAGLE, **REDUCED)),
    "DFlash": (DFlashHead, BLOCK),
    "DFlash, fewer ids": (DFlashHead, replace(BLOCK, **REDUCED)),
    "DSpark": (DSparkHead, replace(BLOCK, **MARKOV)),
    "DSpark, fewer ids": (DSparkHead, replace(BLOCK, **MARKOV | REDUCED)),
    "gated": (DSparkHead, replace(BLOCK, **MARKOV | {"markov_kind": "gated"})),
    "recurrent": (DSparkHead, replace(BLOCK, **MARKOV | {"markov_kind": "rnn", "confidence_reads_token": False})),
    "DFlash 2": (DFlash2Head, FLASH2),
    "DFlash 2, fewer ids": (DFlash2Head, replace(FLASH2, **REDUCED)),
    "DFlash 2, windows": (DFlash2Head, replace(FLASH2, windows=(5, 0), sink=2)),
    "EAGLE-3, window": (Eagle3Head, replace(EAGLE, windows=(5,), rope_start=1)),
    "EAGLE-3, window and first tokens": (Eagle3Head, replace(EAGLE, windows=(5,), sink=2)),
    "P-EAGLE, windows": (PEagleHead, replace(PEAGLE, windows=(5, 0, 4), sink=1)),
    "DFlash, windows": (DFlashHead, replace(BLOCK, windows=(5, 0), sink=2)),
    "DSpark, causal windows": (DSparkHead, replace(BLOCK, **MARKOV, windows=(0, 5), window_causal=True)),
    "P-EAGLE, long windows": (PEagleHead, replace(PEAGLE, windows=(0, 70, 70))),
    "DFlash, long windows": (DFlashHead, replace(BLOCK, windows=(70, 0))),
}


def head(name: str, **changes: Any) -> Any:
    kind, config = HEADS[name]
    return random_head(kind, replace(config, **changes))


def drafter(made: Any, **options: Any) -> Any:
    kinds: dict[Any, Any] = {
        Eagle3Head: Eagle3, PEagleHead: PEagle, DFlashHead: DFlash, DSparkHead: DSpark, DFlash2Head: DFlash2,
    }  # fmt: skip
    return noted(kinds[type(made)])(made, **options)


def page(made: Any) -> Any:
    pages: dict[Any, Any] = {
        Eagle3Head: EagleReference, PEagleHead: PEagleReference, DFlash2Head: DFlash2Reference,
    }  # fmt: skip
    return pages.get(type(made), BlockReference)(as_transformers_runs_it(), made)


@pytest.mark.parametrize("name", list(HEADS)[1:])
@torch.inference_mode()
def test_chains_are_what_the_page_says(name: str) -> None:
    made = head(name)
    reference, drafts = page(made), drafter(made)
    assert answers_of(Engine(target(), drafts, controller="fixed"), GREEDY) == plain_answers(GREEDY)
    for text, proposal in drafts.seen[::9]:
        path: list[int] = []
        for token in proposal.tree.host_ids:
            assert token == int(reference.logits(text, path).argmax()), f"behind {text} {path}"
            path.append(token)
    assert len(drafts.seen) > 20 and max(len(own.tree) for _, own in drafts.seen) == 3


@on_all_backends
@pytest.mark.parametrize(
    "name",
    [
        "EAGLE-3, fewer ids", "P-EAGLE, fewer ids", "DFlash", "DSpark, fewer ids", "recurrent", "EAGLE-3, window",
        "P-EAGLE, windows", "DSpark, causal windows", "DFlash 2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1)}], ids=["chain", "tree"])
@torch.inference_mode()
def test_draws_of_sampled_requests_have_the_pages_distributions(name: str, backend: str, options: Any) -> None:
    made = head(name)
    reference, drafts = page(made), drafter(made, **options)
    engine = Engine(target(backend), drafts, controller="fixed", entropy=3)
    engine.generate([list(each) for each in PROMPTS], SamplingParams(max_tokens=12, temperature=0.8))
    for text, proposal in drafts.seen[::9]:
        tree = proposal.tree
        for row, draws in enumerate(proposal.draws):
            if not draws:
                continue
            path = [tree.host_ids[node] for node in tree.shape.path(row - 1)] if row else []
            expected = torch.softmax(reference.logits(text, path).double() / 0.8, -1)
            torch.testing.assert_close(proposal.probs[draws[0].dist].double(), expected, rtol=0, atol=2e-5)
    assert max(len(own.tree) for _, own in drafts.seen) == (10 if options else 3)


def failing(drafts: Any, fails: Callable[[Sequence[Any]], bool]) -> Any:
    """The drafter with an error behind each level that it draws of such trees."""
    grow_all, draw_all = drafts._grow, getattr(drafts, "_draw_levels", None)

    def _grow(level: Sequence[Any], grow: Any) -> None:
        def grown(trees: Sequence[Any], logits: Tensor) -> Any:
            left = grow(trees, logits)
            if fails(left):
                raise RuntimeError("no more")
            return left

        grow_all(level, grown)

    def _draw_levels(choose: Any, chains: Sequence[Any], numbers: Any) -> Iterator[Any]:
        for level in draw_all(choose, chains, numbers):
            yield level
            if fails(chains):
                raise RuntimeError("no more")

    drafts._grow, drafts._draw_levels = _grow, _draw_levels
    return drafts


@pytest.mark.plants_failures
@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash", "DSpark"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, temperature=1.0)], ids=["greedy", "drawn"])
@pytest.mark.filterwarnings("ignore:drafter")
@torch.inference_mode()
def test_what_failed_for_a_batch_is_drafted_for_each_request_alone(name: str, params: SamplingParams) -> None:
    """Vectors that the failed forwards read are read again; nothing else is drafted than without the failures."""
    runs = []
    for fails in (lambda trees: False, lambda trees: len(trees) > 1):
        engine = Engine(target(), failing(drafter(head(name)), fails), controller="fixed", entropy=3)
        runs.append(engine.generate([list(each) for each in PROMPTS], params))
    assert [each.token_ids for each in runs[0]] == [each.token_ids for each in runs[1]]
    assert [each.stats.draft_tokens for each in runs[0]] == [each.stats.draft_tokens for each in runs[1]]
    assert all(each.stats.recoveries > 2 and not each.warnings for each in runs[1])


@pytest.mark.plants_failures
@pytest.mark.parametrize("name", ["EAGLE-3, fewer ids", "DFlash", "DSpark", "DFlash 2"])
@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1)}, {"nodes": 7}], ids=["chain", "tree", "drawn tree"])
@torch.inference_mode()
def test_levels_that_were_drawn_before_a_failure_are_judged(name: str, options: Any) -> None:
    """They are the first levels of what would have been drafted, draws and probabilities."""
    whole, cut = drafter(head(name), **options), failing(drafter(head(name), **options), lambda trees: bool(trees))
    for drafts in (whole, cut):
        Engine(target(), drafts, controller="fixed", entropy=3).generate(
            list(PROMPTS[0]), SamplingParams(max_tokens=5, temperature=1.0)
        )
    (text, full), (same, first) = next(each for each in whole.seen if len(each[1].tree)), cut.seen[-1]
    assert (text, first.tree.shape.depth) == (same, 1)
    assert first.tree.host_ids == full.tree.host_ids[: len(first.tree)] and first.draws[0] == full.draws[0]
    assert torch.equal(first.probs, full.probs[:1])


@pytest.mark.parametrize("name", ["EAGLE-3", "P-EAGLE", "DFlash", "DSpark", "DFlash 2"])
@torch.inference_mode()
def test_the_likeliest_tree_has_the_largest_products_of_a_search_by_hand(name: str) -> None:
    made = head(name)
    reference, drafts = page(made), drafter(made, nodes=7, beams=3)
    assert answers_of(Engine(target(), drafts, controller="fixed"), GREEDY) == plain_answers(GREEDY)
    whole = [each for each, depth in zip(drafts.seen, drafts.depths, strict=True) if depth == 3]
    for text, proposal in whole[:40:9]:
        found: dict[tuple[int, ...], float] = {}
        opened: list[tuple[int, ...]] = [()]
        for _ in range(3):
            level = {}
            for path in opened:
                logs, ids = torch.log_softmax(reference.logits(text, path), -1).topk(3)
                level |= {(*path, int(i)): found.get(path, 0.0) + float(log) for i, log in zip(ids, logs, strict=True)}
            found |= level
            opened = sorted(level, key=lambda path: -level[path])[:3]
        tree = proposal.tree
        paths = {tuple(tree.host_ids[each] for each in tree.shape.path(node)) for node in range(len(tree))}
        assert paths == set(sorted(found, key=lambda path: -found[path])[:7])


@pytest.mark.parametrize("shape", [{}, {"nodes": 7, "beams": 3}], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "name", ["EAGLE-3, fewer ids", "P-EAGLE", "DFlash, fewer ids", "DSpark, fewer ids", "DFlash 2"]
)
@torch.inference_mode()
def test_seeded_and_shaped_answers_are_those_of_plain_decoding(name: str, shape: dict[str, int]) -> None:
    for options in ({"temperature": 1.0, "seed": 5}, {"logit_bias": {7: 3.0}, "presence_penalty": 0.5}):
        params = SamplingParams(max_tokens=24, **options)  # type: ignore[arg-type]
        engine = Engine(target(), drafter(head(name), **shape), controller="fixed")
        assert answers_of(engine, params, PROMPTS[:1]) == plain_answers(params, PROMPTS[:1])


@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1)}, {"nodes": 7, "beams": 3}], ids=str)
@torch.inference_mode()
def test_the_confidence_head_ends_drafts_by_what_was_known_before_each_draw(options: dict[str, Any]) -> None:
    """A token is drawn where the product down to it is as large as asked for, whatever the token then is."""
    made, least = head("DSpark"), 0.3
    reference = page(made)
    drafts = drafter(made, min_acceptance=least, **options)
    temperature = 0.0 if "nodes" in options else 1.0
    params = SamplingParams(max_tokens=16, temperature=temperature)
    Engine(target(), drafts, controller="fixed", entropy=1).generate([list(each) for each in PROMPTS], params)
    found = set()
    for text, proposal in [each for each, depth in zip(drafts.seen, drafts.depths, strict=True) if depth == 3][::7]:
        tree = proposal.tree
        found.add(tree.shape.depth)
        for node in range(-1, len(tree)):
            path = [tree.host_ids[each] for each in tree.shape.path(node)]
            chances = [torch.sigmoid(reference.draft_logits(text, path[:end])[1]) for end in range(len(path) + 1)]
            products = torch.stack(chances).cumprod(0)
            assert len(path) == 0 or float(products[-2]) >= least - 1e-4
            if not options and node == len(tree) - 1:  # the end of a chain
                assert len(path) == 3 or float(products[-1]) < least + 1e-4
    assert len(found) > 1


@pytest.mark.parametrize("name", ["EAGLE-3", "DSpark"])
@torch.inference_mode()
def test_tokens_that_others_drafted_are_read_with_the_targets_vectors(name: str) -> None:
    """Beside prompt lookup, and at steps in which nothing is drafted: later chains are those of the page."""
    made = head(name)
    reference, drafts, prompts = page(made), drafter(made), [list(PROMPTS[0]) * 3]
    engine = Engine(target(), Portfolio({"head": drafts, "prompt-lookup": PromptLookup()}), controller="in-turn")
    assert answers_of(engine, GREEDY, prompts) == plain_answers(GREEDY, prompts)
    for text, proposal in drafts.drafted:
        assert proposal.tree.host_ids[0] == int(reference.logits(text, ()).argmax())
    assert len(drafts.drafted) > 3


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash"])
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(CompositionError, match=r"reads layers 0, 7, and tiny shows 3"):
        Engine(target(), drafter(head(name, layers=(0, 7))))
    with pytest.raises(CompositionError, match="guesses the id 119, and tiny has 97 ids"):
        Engine(target(), drafter(head(name, vocab_size=200, draft_vocab=60, own_output=True)))
    with pytest.raises(OptionError, match="takes branching or nodes"):
        drafter(head(name), nodes=8, branching=(2, 1))
    with pytest.raises(OptionError, match="layers are not named"):
        drafter(head(name, layers=()))


def test_masks_draft_the_same_however_the_output_is_normed() -> None:
    """All tokens come from one forward, so the next step reads none of its outputs."""
    proposals = []
    for norm_output in (False, True):
        drafts = drafter(head("P-EAGLE", norm_output=norm_output))
        answers_of(Engine(target(), drafts, controller="fixed"), GREEDY, PROMPTS[:1])
        proposals.append([(text, own.tree.host_ids) for text, own in drafts.drafted])
    assert proposals[0] == proposals[1] and len(proposals[0]) > 5
    with pytest.raises(OptionError, match=f"the mask token is an id below {VOCAB}, got 300"):
        head("P-EAGLE", mask_token=300)


def test_what_does_not_fit_a_block_is_refused() -> None:
    with pytest.raises(CompositionError, match="embedding of the id 150 as its mask, and tiny has 97 ids"):
        Engine(target(), drafter(head("DFlash", vocab_size=200, mask_id=150)))
    with pytest.raises(OptionError, match="guesses 3 tokens at once, and 4 are asked for"):
        drafter(head("DFlash"), num_speculative_tokens=4)
    with pytest.raises(OptionError, match="goes by a confidence head"):
        drafter(head("DSpark", confidence=False, confidence_reads_token=False), min_acceptance=0.5)


SENSELESS: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"depth": 0}, "depth of a block drafter must be 1 or more"),
    "the anchor alone": ({"block": 1}, "guesses nothing"),
    "odd heads": ({"head": 15}, "their entries even"),
    "a layer twice": ({"layers": (1, 1)}, "different layers"),
    "the embedding": ({"layers": (-1, 1)}, "different layers"),
    "a mask that is no id": ({"mask_id": VOCAB}, "an id below 97, got 97"),
    "fewer ids in the target's head": ({"draft_vocab": 40}, "needs an LM head of its own"),
    "another Markov head": ({"markov": 4, "markov_kind": "lstm"}, "vanilla, gated, rnn"),
    "a token that nobody embeds": ({"confidence": True, "confidence_reads_token": True}, "Markov head's embedding"),
    "no flag": ({"from_anchor": 1}, "must be true or false"),
    "windows of other layers": ({"windows": (9, 9, 9)}, "are 3, and it has 2 layers"),
    "a window within a draft": ({"windows": (3,)}, "more than the 3 tokens that are drafted, got 3"),
    "first tokens of all": ({"sink": 4}, "how many first tokens layers with a window see, got 4"),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_sizes_that_make_no_head_are_refused(name: str) -> None:
    changes, said = SENSELESS[name]
    with pytest.raises(OptionError, match=said):
        replace(BLOCK, **changes)


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash"])
def test_vectors_are_read_without_the_entries_of_padding(name: str) -> None:
    """Of a padded target, each layer's first entries are the model's own."""
    layers = tuple(torch.randn(2, 64, generator=torch.Generator().manual_seed(layer)) for layer in range(2))
    outcome = StepOutcome(Proposal.empty(), (), (5, 6), layers=layers)
    expected = torch.cat([layers[0][:, :48], layers[1][:, :48]], dim=1)
    drafts, request = drafter(head(name)), DraftRequest(0, GREEDY, [1])
    drafts.check(target())
    drafts.begin(request)
    drafts.observe([request], [outcome])
    assert torch.equal(drafts._texts[0].vectors(), expected)
