"""The embedded Medusa heads: they fit the embedded target in every guise, keep its tokens, and shorten its work."""

from __future__ import annotations

import json

import pytest

from support.embedded_models import embedded
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.stats import Counters
from truedraft.drafters import Medusa, from_spec
from truedraft.errors import CompositionError, UnknownOptionError
from truedraft.models.embedded import embedded_heads, heldout_prompts_file

PROMPTS = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()][:8]


def test_they_are_found_by_name_and_small() -> None:
    target = embedded(device="cpu")
    drafter = from_spec("medusa", target)
    assert isinstance(drafter, Medusa) and not drafter.nodes_chosen
    assert from_spec("medusa:embedded:medusa,nodes=8", target).limits.nodes == 8
    folder = embedded_heads("medusa")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
    assert "icen" in (folder / "README.md").read_text()
    with pytest.raises(UnknownOptionError, match="did you mean 'medusa'"):
        from_spec("medusa:embedded:medsua", target)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"pad_to": "110M"}, {"fast_paths": False}])
def test_they_fit_the_target_in_every_guise(options: dict[str, object]) -> None:
    target = load_model("embedded:target", device="cpu", **options)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    answer = Engine(target, from_spec("medusa,nodes=16", target), controller="fixed").generate(PROMPTS[0], params)
    assert answer.warnings == ()
    assert answer.token_ids == Engine(target).generate(PROMPTS[0], params).token_ids
    assert answer.stats.accepted_tokens > 0


def test_they_are_refused_for_the_draft() -> None:
    draft = embedded("draft", device="cpu")
    with pytest.raises(CompositionError, match=r"heads for embedded:target read 384 .* embedded:draft has 128"):
        from_spec("medusa:embedded:medusa", draft)
    for kind in ("medusa", "redrafter"):
        told = f"no '{kind}' drafter was trained for 'embedded:draft'; train one by truedraft train {kind} --model "
        with pytest.raises(CompositionError, match=f"{told}embedded:draft, .* or name one as {kind}:DIR$"):
            from_spec(kind, draft)


@pytest.mark.parametrize(("temperature", "nodes", "least"), [(0.0, 32, 1.9), (1.0, 32, 1.4)])
def test_acceptance_on_shipped_prompts(temperature: float, nodes: int, least: float) -> None:
    """Far below what all 32 prompts gave (the card), for eight prompts scatter; a broken path gives hardly over 1."""
    target = embedded(device="cpu")
    engine = Engine(target, from_spec(f"medusa,nodes={nodes}", target), controller="fixed", entropy=0)
    params = SamplingParams(max_tokens=64, temperature=temperature, ignore_eos=True)
    answers = engine.generate(PROMPTS, params)
    stats = sum((answer.stats for answer in answers), Counters())
    assert stats.mean_acceptance_length >= least
    if temperature == 0.0:
        assert [a.token_ids for a in answers] == [a.token_ids for a in Engine(target).generate(PROMPTS, params)]
