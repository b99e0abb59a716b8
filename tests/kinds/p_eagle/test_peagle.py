"""P-EAGLE heads as drafters, held to a slow reference that is written from the paper's page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kinds.eagle.test_eagle import SIZES
from support.eagle_reference import PEagleReference, random_eagle
from support.layer_heads import GREEDY, Records, answers_of, as_transformers_runs_it, plain_answers, target
from support.tiny_models import PROMPTS, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.drafters import PEagle, from_spec
from truedraft.errors import OptionError
from truedraft.kinds.eagle.folders import write_speculators_folder
from truedraft.kinds.p_eagle.module import PEagleConfig, PEagleHead

SEEDED = SamplingParams(max_tokens=16, temperature=1.0, seed=5)


def head(**changes: Any) -> PEagleHead:
    sizes = asdict(SIZES) | {"reach": 4, "more_layers": 2, "mask_token": 7} | changes
    made = random_eagle(PEagleConfig(**sizes), PEagleHead)
    assert isinstance(made, PEagleHead)
    return made


class Recorded(Records, PEagle):
    pass


@pytest.mark.parametrize("changes", [{}, {"draft_vocab": 40}, {"own_embedding": True}, {"norm_output": True}], ids=str)
@torch.inference_mode()
def test_chains_are_what_the_page_says(changes: dict[str, Any]) -> None:
    made = head(**changes)
    drafter = Recorded(made)
    reference = PEagleReference(as_transformers_runs_it(), head(**changes | {"norm_output": False}))
    assert answers_of(Engine(target(), drafter, controller="fixed"), GREEDY) == plain_answers(GREEDY)
    drafted = [(text, own.tree.host_ids) for text, own in drafter.drafted]
    for text, ids in drafted[::5]:
        assert ids == [int(each.argmax()) for each in reference.ahead(text, len(ids))], f"behind {text}"
    assert sum(len(ids) == 4 for _, ids in drafted) > 20
    seeded = Engine(target(), PEagle(made), controller="fixed")
    assert answers_of(seeded, SEEDED, PROMPTS[:1]) == plain_answers(SEEDED, PROMPTS[:1])


@torch.inference_mode()
def test_nodes_at_one_depth_share_the_pages_distribution() -> None:
    made = head(draft_vocab=40)
    reference, drafter = PEagleReference(as_transformers_runs_it(), made), Recorded(made, branching=(2, 2, 1))
    params = SamplingParams(max_tokens=16, temperature=0.8)
    Engine(target(), drafter, controller="fixed", entropy=3).generate([list(each) for each in PROMPTS], params)
    for text, proposal in drafter.seen[::7]:
        logits = reference.ahead(text, 3)
        for row, draws in enumerate(proposal.draws):
            if draws:
                depth = len(proposal.tree.shape.path(row - 1)) if row else 0
                expected = torch.softmax(logits[depth].double() / 0.8, -1)
                torch.testing.assert_close(proposal.probs[draws[0].dist].double(), expected, rtol=0, atol=2e-5)
    assert any(len(proposal.tree) > 5 for _, proposal in drafter.seen)


@torch.inference_mode()
def test_the_likeliest_tree_takes_the_largest_products_of_the_depths() -> None:
    made = head()
    drafter, reference = Recorded(made, nodes=6, beams=3), PEagleReference(as_transformers_runs_it(), made)
    assert answers_of(Engine(target(), drafter, controller="fixed"), GREEDY) == plain_answers(GREEDY)
    for text, proposal in [each for each in drafter.seen if len(each[1].tree) == 6][::8]:
        logs = [each.log_softmax(-1) for each in reference.ahead(text, 4)]
        tree = proposal.tree
        paths = [[tree.host_ids[each] for each in tree.shape.path(node)] for node in range(len(tree))]
        scores = [sum(float(logs[depth][token]) for depth, token in enumerate(path)) for path in paths]
        assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
        best = max(float(each) for each in logs[0])
        assert scores[0] == pytest.approx(best, abs=1e-4)


def test_a_folder_drafts_as_far_as_it_says(tmp_path: Path) -> None:
    write_speculators_folder(head(own_embedding=True, draft_vocab=40), tmp_path, target="org/target")
    assert from_spec(f"p-eagle:{tmp_path}", target()).limits.depth == 4
    with pytest.raises(OptionError, match=f"the mask token is an id below {VOCAB}, got 300"):
        head(mask_token=300)
