"""Words for drafters."""

from __future__ import annotations

import pytest

from truedraft.drafters import DraftModel, NoDrafter, PromptLookup, from_spec, specs
from truedraft.errors import OptionError, TruedraftError, UnknownOptionError, VocabularyMismatchError
from truedraft.testing import MarkovModel


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(6, seed=1)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for loading; notes what was asked for."""
    names: list[str] = []

    def load(name: str, *, dtype: str, device: str, fast_paths: bool) -> MarkovModel:
        assert not fast_paths, "the target has none"
        names.append(f"{name} {dtype} {device}")
        return MarkovModel.random(6, seed=2)

    monkeypatch.setattr(specs, "load_model", load)
    return names


def test_words_become_drafters(target: MarkovModel, loaded: list[str]) -> None:
    assert isinstance(from_spec("none", target), NoDrafter)
    lookup = from_spec("prompt-lookup,num_speculative_tokens=9,max_ngram=3,min_ngram=1", target)
    assert isinstance(lookup, PromptLookup)
    assert lookup.limits.depth == 9
    chain = from_spec("draft:some/folder,num_speculative_tokens=3,min_probability=0.25", target)
    assert isinstance(chain, DraftModel)
    assert (chain.limits.depth, chain.limits.width, chain.limits.min_probability) == (3, 1, 0.25)
    tree = from_spec("draft,branching=3-2-1", target)
    assert isinstance(tree, DraftModel)
    assert (tree.limits.depth, tree.limits.width, tree.limits.nodes) == (3, 3, 3 + 6 + 6)
    assert loaded == ["some/folder float64 cpu", "embedded:draft float64 cpu"]


def test_auto_is_the_embedded_draft_only_for_the_embedded_target(target: MarkovModel, loaded: list[str]) -> None:
    assert isinstance(from_spec("auto", target), PromptLookup)
    target.name = "embedded:target"
    assert isinstance(from_spec("auto", target), DraftModel)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("drafft", UnknownOptionError, "did you mean 'draft'"),
        ("draft,num_speculativ_tokens=3", UnknownOptionError, "did you mean 'num_speculative_tokens'"),
        ("draft,num_speculative_tokens=three", OptionError, "'three'"),
        ("draft,num_speculative_tokens", OptionError, "option=value"),
        ("draft,num_speculative_tokens=0", OptionError, "1 or more"),
        ("draft,branching=3-0", OptionError, "1 or more"),
        ("draft,branching=1000-1000-1000", OptionError, "more than 1024 nodes"),
        ("draft,num_speculative_tokens=1000000000", OptionError, "at most 1024"),
        ("draft,min_probability=2", OptionError, "min_probability"),
        ("draft,min_probability=x", OptionError, "'x'"),
        ("none:folder", OptionError, "takes no path"),
        ("none,depth=3", UnknownOptionError, "depth"),
        ("prompt-lookup,min_ngram=5,max_ngram=2", OptionError, "min_ngram"),
        ("", UnknownOptionError, "drafter ''"),
    ],
)
def test_bad_words_are_named(
    target: MarkovModel, loaded: list[str], spec: str, kind: type[TruedraftError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        from_spec(spec, target)


def test_a_draft_of_another_vocabulary_is_refused_before_anything_runs(loaded: list[str]) -> None:
    with pytest.raises(VocabularyMismatchError, match=r"6 token ids .* 7"):
        from_spec("draft", MarkovModel.random(7, seed=1))
