"""Block drafters, held to a slow reference that is written from the papers' pages, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.backends import HostRecorder, graph_backend, native_backend
from support.block_reference import BlockReference, as_transformers_runs_it, random_block
from support.tiny_models import CONTEXT, PROMPTS, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import DFlash, DraftRequest, DSpark, Portfolio, PromptLookup
from truedraft.errors import CompositionError, OptionError
from truedraft.heads import BlockConfig, BlockHead, DFlashHead, DSparkHead, HeadRecord
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel

SIZES = BlockConfig(48, VOCAB, (0, 1), 4, 96, 2, heads=4, kv_heads=2, head=16, inner=64, most_positions=CONTEXT)
MARKOV: dict[str, Any] = {
    "from_anchor": True, "markov": 8, "confidence": True, "confidence_reads_token": True, "block": 3,
}  # fmt: skip
REDUCED: dict[str, Any] = {"draft_vocab": 40, "own_output": True}
BACKENDS = {
    "stock": StockBackend,
    "native": native_backend,
    "graphs": lambda model: graph_backend(model, HostRecorder()),
}
VARIANTS: dict[str, tuple[type[BlockHead], dict[str, Any]]] = {
    "DFlash": (DFlashHead, {}),
    "DFlash, fewer ids": (DFlashHead, REDUCED),
    "DSpark": (DSparkHead, MARKOV),
    "DSpark, fewer ids": (DSparkHead, MARKOV | REDUCED),
    "gated": (DSparkHead, MARKOV | {"markov_kind": "gated"}),
    "recurrent": (DSparkHead, MARKOV | {"markov_kind": "rnn", "confidence_reads_token": False}),
}
GREEDY = SamplingParams(max_tokens=24)
needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)


def target(backend: str = "stock") -> HuggingFaceModel:
    return HuggingFaceModel(as_transformers_runs_it(), None, "tiny", BACKENDS[backend])


def head(name: str, **changes: Any) -> Any:
    kind, options = VARIANTS[name]
    return random_block(kind, replace(SIZES, **options, **changes))


class Records:
    """Notes each request's text and what was proposed behind it."""

    def propose(self, batch: Sequence[DraftRequest], budgets: Any, noise: Any) -> list[Proposal]:
        proposals = super().propose(batch, budgets, noise)  # type: ignore[misc]
        self.seen = getattr(self, "seen", [])
        self.seen += [(list(each.tokens), own) for each, own in zip(batch, proposals, strict=True)]
        self.depths = [*getattr(self, "depths", []), *(each.depth for each in budgets)]
        return proposals


class Flash(Records, DFlash):
    pass


class Spark(Records, DSpark):
    pass


def drafter(made: BlockHead, **options: Any) -> Any:
    return (Spark if isinstance(made, DSparkHead) else Flash)(made, **options)


def plain_answers(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Any]:
    return [each.token_ids for each in Engine(target()).generate([list(each) for each in prompts], params)]


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_chains_are_what_the_page_says(name: str) -> None:
    made = head(name)
    reference, drafts = BlockReference(as_transformers_runs_it(), made), drafter(made)
    answers = Engine(target(), drafts, controller="fixed").generate([list(each) for each in PROMPTS], GREEDY)
    assert [each.token_ids for each in answers] == plain_answers(GREEDY)
    for text, proposal in drafts.seen[::9]:
        path: list[int] = []
        for token in proposal.tree.host_ids:
            assert token == int(reference.logits(text, path).argmax()), f"behind {text} {path}"
            path.append(token)
    assert len(drafts.seen) > 20 and max(len(own.tree) for _, own in drafts.seen) == 3


@pytest.mark.parametrize("backend", ["stock", pytest.param("native", marks=needs_library)])
@pytest.mark.parametrize("name", ["DFlash", "DSpark, fewer ids", "recurrent"])
@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1)}], ids=["chain", "tree"])
@torch.inference_mode()
def test_draws_of_sampled_requests_have_the_pages_distributions(name: str, backend: str, options: Any) -> None:
    made = head(name)
    reference, drafts = BlockReference(as_transformers_runs_it(), made), drafter(made, **options)
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


@pytest.mark.parametrize("name", ["DFlash", "DSpark"])
@torch.inference_mode()
def test_the_likeliest_tree_has_the_largest_products_of_a_search_by_hand(name: str) -> None:
    made = head(name)
    reference, drafts = BlockReference(as_transformers_runs_it(), made), drafter(made, nodes=7, beams=3)
    answers = Engine(target(), drafts, controller="fixed").generate([list(each) for each in PROMPTS], GREEDY)
    assert [each.token_ids for each in answers] == plain_answers(GREEDY)
    for text, proposal in drafts.seen[:40:9]:
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


@pytest.mark.parametrize("name", ["DFlash, fewer ids", "DSpark, fewer ids"])
@torch.inference_mode()
def test_seeded_and_shaped_answers_are_those_of_plain_decoding(name: str) -> None:
    for options in ({"temperature": 1.0, "seed": 5}, {"logit_bias": {7: 3.0}, "presence_penalty": 0.5}):
        params = SamplingParams(max_tokens=24, **options)  # type: ignore[arg-type]
        answers = Engine(target(), drafter(head(name)), controller="fixed").generate([list(PROMPTS[0])], params)
        assert answers[0].token_ids == plain_answers(params, PROMPTS[:1])[0]


@pytest.mark.parametrize("options", [{}, {"branching": (2, 2, 1)}, {"nodes": 7, "beams": 3}], ids=str)
@torch.inference_mode()
def test_the_confidence_head_ends_drafts_by_what_was_known_before_each_draw(options: dict[str, Any]) -> None:
    """A token is drawn where the product down to it is as large as asked for, whatever the token then is."""
    made, least = head("DSpark"), 0.3
    reference = BlockReference(as_transformers_runs_it(), made)
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


@torch.inference_mode()
def test_tokens_that_others_drafted_are_read_with_the_targets_vectors() -> None:
    """Beside prompt lookup, and at steps in which nothing is drafted: later chains are those of the page."""
    made = head("DSpark")
    drafts = drafter(made)
    engine = Engine(target(), Portfolio({"dspark": drafts, "prompt-lookup": PromptLookup()}), controller="in-turn")
    prompt = list(PROMPTS[0]) * 3
    answer = engine.generate([prompt], GREEDY)[0]
    assert answer.token_ids == plain_answers(GREEDY, [prompt])[0]
    reference = BlockReference(as_transformers_runs_it(), made)
    drafted = [(text, own) for text, own in drafts.seen if len(own.tree)]
    for text, proposal in drafted:
        assert proposal.tree.host_ids[0] == int(reference.logits(text, ()).argmax())
    assert len(drafted) > 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"reads layers 0, 7, and tiny shows 3"):
        Engine(target(), drafter(head("DFlash", layers=(0, 7))))
    with pytest.raises(CompositionError, match="guesses the id 119, and tiny has 97 ids"):
        Engine(
            target(), drafter(random_block(DFlashHead, replace(SIZES, vocab_size=200, draft_vocab=60, own_output=True)))
        )
    with pytest.raises(OptionError, match="'dflash' takes branching or nodes"):
        drafter(head("DFlash"), nodes=8, branching=(2, 1))
    with pytest.raises(OptionError, match="guesses 3 tokens at once, and 4 are asked for"):
        drafter(head("DFlash"), num_speculative_tokens=4)
    with pytest.raises(OptionError, match="layers are not named"):
        drafter(head("DFlash", layers=()))
    with pytest.raises(OptionError, match="goes by a confidence head"):
        drafter(random_block(DSparkHead, replace(SIZES, markov=8)), min_acceptance=0.5)


SENSELESS: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"depth": 0}, "depth of a block drafter must be 1 or more"),
    "the anchor alone": ({"block": 1}, "guesses nothing"),
    "odd heads": ({"head": 15}, "their entries even"),
    "a layer twice": ({"layers": (1, 1)}, "different layers"),
    "the embedding": ({"layers": (-1, 1)}, "different layers"),
    "a mask that is no id": ({"mask_id": VOCAB}, "one of 97"),
    "fewer ids in the target's head": ({"draft_vocab": 40}, "needs an LM head of its own"),
    "another Markov head": ({"markov": 4, "markov_kind": "lstm"}, "vanilla, gated, rnn"),
    "a token that nobody embeds": ({"confidence": True, "confidence_reads_token": True}, "Markov head's embedding"),
    "no flag": ({"from_anchor": 1}, "must be true or false"),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_sizes_that_make_no_head_are_refused(name: str) -> None:
    changes, said = SENSELESS[name]
    with pytest.raises(OptionError, match=said):
        replace(SIZES, **changes)


def test_the_usual_layers_are_those_of_the_published_heads() -> None:
    """DFlash for Qwen3-4B, of 36 layers, reads the outputs of layers 1, 9, 17, 25 and 33."""
    assert replace(SIZES, layers=()).at_usual_layers(36).layers == (1, 9, 17, 25, 33)
    assert SIZES.at_usual_layers(36) is SIZES
    with pytest.raises(OptionError, match="of a target with 7 layers there are no five"):
        replace(SIZES, layers=()).at_usual_layers(7)


@pytest.mark.parametrize("name", ["DFlash", "DSpark, fewer ids"])
def test_a_folder_holds_what_was_saved(name: str, tmp_path: Any) -> None:
    made = head(name)
    made.save(tmp_path, HeadRecord("tiny", "f"), dtype=torch.float32)
    kept = type(made).load(tmp_path)
    assert kept.config == made.config and kept.record.target_name == "tiny"
    for key, weight in made.state_dict().items():
        assert kept.state_dict()[key].equal(weight), key
