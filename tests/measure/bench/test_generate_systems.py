"""transformers' own generate as systems under test: the same weights give the same tokens in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cli.tiny import save_tiny_llama
from measure.peers.test_transformers import noisy
from truedraft import Engine
from truedraft.core.params import SamplingParams
from truedraft.measure.bench import Suite, load_suite
from truedraft.measure.bench.suite import ASSISTED, GenerateSystem
from truedraft.options import MachineOptions, ModelOptions

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = tuple((7 * i * i + 3 * i + 1) % 250 + 1 for i in range(30))
SHORT = (9, 80, 33)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that often agrees with it."""
    target = save_tiny_llama(tmp_path_factory.mktemp("peer") / "target", seed=1, layers=2)
    return target, str(noisy(target, tmp_path_factory.mktemp("peer") / "draft"))


def load(folders: tuple[str, str], pad_to: str | None = None, **parts: Any) -> Suite:
    target, draft = folders
    words: dict[str, Any] = {"drafters": (f"draft:{draft}",), "peers": ("transformers",)}
    return load_suite(ModelOptions(target, pad_to), MachineOptions("float32"), **(words | parts))


def peer(found: Suite, name: str) -> GenerateSystem:
    system = next(each for each in found.peers if each.name == name)
    assert isinstance(system, GenerateSystem)
    return system


@pytest.fixture(scope="module")
def all_peers(folders: tuple[str, str]) -> Suite:
    return load(folders)


def plain_tokens(found: Suite, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    return [answer.token_ids for answer in Engine(found.target).generate([list(p) for p in prompts], params)]


def test_the_lineup(all_peers: Suite) -> None:
    names = [each.name for each in all_peers.systems]
    assert names[:4] == ["plain", "draft:draft", "transformers", "transformers lookup"]
    assert len(names) == 7 and all_peers.best_of == {ASSISTED: tuple(names[4:])}


def test_the_same_tokens(all_peers: Suite) -> None:
    expected = tuple(plain_tokens(all_peers, [PROMPT], GREEDY)[0])
    assert len(expected) == 24 and len(set(expected)) > 5
    for system in all_peers.systems:
        outcome = system.answer([PROMPT], GREEDY)
        assert outcome.token_ids == (expected,), system.name
        first = outcome.first_token_s[0]
        assert first is not None and first > 0 and outcome.prefill_s > 0
        assert outcome.target_calls is not None and outcome.mean_acceptance_length is not None


def test_what_is_counted(all_peers: Suite) -> None:
    plain = peer(all_peers, "transformers").answer([PROMPT], GREEDY)
    assert plain.target_calls == plain.forwards == 23 and plain.mean_acceptance_length == 1.0
    assert plain.draft_forwards == 0 and plain.context_tokens == 23 * (30 + 12)
    assisted = peer(all_peers, f"{ASSISTED}, 4 tokens").answer([PROMPT], GREEDY)
    calls = assisted.target_calls
    assert calls is not None and calls < 23 and assisted.draft_forwards >= calls
    assert assisted.mean_acceptance_length == pytest.approx(24 / calls)


def test_tokens_of_the_first_call_are_counted(all_peers: Suite) -> None:
    """Where the first draft is accepted, several tokens come with the prefill, and are no decoding."""
    prompts, few = [PROMPT[:count] for count in range(4, 30, 2)], SamplingParams(max_tokens=6, ignore_eos=True)
    plain, assisted = (peer(all_peers, name) for name in ("transformers", f"{ASSISTED}, 4 tokens"))
    found = [assisted.answer([prompt], few).first_tokens for prompt in prompts]
    assert 1 in found and 1 < max(found) <= 5
    assert plain.answer(prompts[:1], few).first_tokens == 1


def test_settings_are_kept_apart(all_peers: Suite) -> None:
    """The heuristic drafts on from where its last answer ended, whatever other settings did in between."""
    heuristic, constant = (peer(all_peers, f"{ASSISTED}, {words}") for words in ("heuristic from 5", "4 tokens"))
    for _ in range(2):
        heuristic.answer([PROMPT], GREEDY)
        first = constant.answer([PROMPT], GREEDY)
    assert constant.answer([PROMPT], GREEDY).draft_forwards == first.draft_forwards
    schedules = [each.engine._schedule for each in (constant, heuristic)]
    assert schedules[0] is not None and schedules[0].num_assistant_tokens == 4
    assert schedules[1] is not None and schedules[1].num_assistant_tokens != 5


def test_a_batch_is_padded_on_the_left(folders: tuple[str, str]) -> None:
    found = load(folders, batch=2)
    assert [each.name for each in found.peers] == ["transformers"]
    assert "one prompt at a time" in found.notes[-1]
    expected = plain_tokens(found, [PROMPT, SHORT], GREEDY)
    outcome = found.peers[0].answer([PROMPT, SHORT], GREEDY)
    assert [list(tokens) for tokens in outcome.token_ids] == expected
    assert outcome.target_calls == 46 and outcome.forwards == 23


def test_without_a_draft_model(folders: tuple[str, str]) -> None:
    found = load(folders, drafters=("prompt-lookup", "none"))
    names = ["plain", "prompt-lookup", "transformers", "transformers lookup"]
    assert [each.name for each in found.systems] == names
    assert "no draft model is among the drafters" in found.notes[-1]


def test_drafters_have_names_of_their_own(folders: tuple[str, str]) -> None:
    draft = folders[1]
    words = (f"draft:{draft},num_speculative_tokens=2", f"draft:{draft}", "prompt-lookup", "auto", "auto", "none")
    found = load(folders, drafters=words, peers=())
    names = ["plain", "draft:draft,num_speculative_tokens=2", "draft:draft", "prompt-lookup", "auto", "auto (2)"]
    assert [each.name for each in found.ours] == names
