"""Words for drafters."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from truedraft import Engine, SamplingParams
from truedraft.drafters import Cascade, DraftModel, NoDrafter, ParallelDraft, PromptLookup, from_spec
from truedraft.drafters.kinds import KINDS, dotted, trained_kinds
from truedraft.drafters.portfolio import Portfolio
from truedraft.drafters.specs import drafter_described, drafter_words
from truedraft.errors import OptionError, TruedraftError, UnknownOptionError, VocabularyMismatchError
from truedraft.models import loading
from truedraft.testing import MarkovModel


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(6, seed=1)


class Loading:
    """Stands in for loading, in another process, too; notes what was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, *, dtype: str, device: str, fast_paths: bool, kv_dtype: str) -> MarkovModel:
        assert not fast_paths, "the target has none"
        self.names.append(f"{name} {dtype} {device}" + (f" {kv_dtype}" if kv_dtype != "auto" else ""))
        return MarkovModel.random(6, seed=2)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    load = Loading()
    monkeypatch.setattr(loading, "load_model", load)
    return load.names


def test_a_draft_of_another_process(target: MarkovModel, loaded: list[str]) -> None:
    drafter = from_spec("draft:some/folder,num_speculative_tokens=3,min_probability=0.25,kv_dtype=int8,async=1", target)
    assert isinstance(drafter, ParallelDraft)
    assert drafter.limits == DraftModel(MarkovModel.random(6, seed=2), 3, min_probability=0.25).limits
    assert (drafter.name, loaded) == ("draft", ["some/folder float64 cpu int8"])
    assert isinstance(from_spec("draft,async=0", target), DraftModel)
    params = SamplingParams(max_tokens=12)
    assert (
        Engine(target, drafter, controller="fixed").generate([1, 2], params).token_ids
        == Engine(target).generate([1, 2], params).token_ids
    )
    assert drafter.report["proposals"] > 0


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


def test_a_portfolio_of_words(target: MarkovModel, loaded: list[str]) -> None:
    drafter = from_spec('portfolio(draft:"x;y",num_speculative_tokens=2 ; prompt-lookup; draft)', target)
    assert list(drafter.members) == ["draft", "prompt-lookup", "draft-2"]
    assert [member.limits.depth for member in drafter.members.values()] == [2, 6, 4]
    assert loaded == ["x;y float64 cpu", "embedded:draft float64 cpu"]
    assert list(from_spec("portfolio(prompt-lookup)", target).members) == ["prompt-lookup"]


def test_auto_of_a_model_without_weights_is_prompt_lookup_alone(target: MarkovModel, loaded: list[str]) -> None:
    target.name = "embedded:target"
    drafter = from_spec("auto", target)
    assert isinstance(drafter, Portfolio) and list(drafter.members) == ["prompt-lookup"]
    assert loaded == []


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("drafft", UnknownOptionError, "did you mean 'draft'"),
        ("draft,num_speculativ_tokens=3", UnknownOptionError, "did you mean 'num_speculative_tokens'"),
        ("draft,num_speculative_tokens=three", OptionError, "'three'"),
        ("draft,num_speculative_tokens=0", OptionError, "1 or more"),
        ("draft,branching=3-0", OptionError, "1 or more"),
        ("draft,branching=1000-1000-1000", OptionError, "more than 1024 nodes"),
        ("draft,num_speculative_tokens=1000000000", OptionError, "at most 1024"),
        ("prompt-lookup,num_speculative_tokens=5000", OptionError, "num_speculative_tokens .* at most 1024, got 5000"),
        ("suffix,num_speculative_tokens=5000,nodes=24", OptionError, "num_speculative_tokens .* at most 1024, got"),
        ("suffix,nodes=5000", OptionError, "nodes .* at most 1024, got 5000"),
        ("draft,min_probability=2", OptionError, "min_probability"),
        ("draft,min_probability=x", OptionError, "'x'"),
        ("draft,async=yes", OptionError, "async must be 1 .* or 0, got 'yes'"),
        ("draft,async=1,outcomes=2", UnknownOptionError, "'outcomes'; it is gone, take only async=1"),
        ("early-exit:2", UnknownOptionError, "unknown drafter 'early-exit'; it is gone, take self:int4"),
        ("draft,async=1,branching=3-2", OptionError, "async drafts one chain, and branching or chains make trees"),
        ("none:folder", OptionError, "takes no path"),
        ("none,depth=3", UnknownOptionError, "depth"),
        ("prompt-lookup,min_ngram=5,max_ngram=2", OptionError, "min_ngram"),
        ("", UnknownOptionError, "drafter ''"),
        ("draft,branching=2,branching=3", OptionError, "has branching twice"),
        ("draft(prompt-lookup)", OptionError, "drafter 'draft' has no members"),
        ("drafft(prompt-lookup)", UnknownOptionError, "unknown drafter 'drafft'; did you mean 'draft'"),
        ("portfolio", OptionError, "drafter 'portfolio' needs members"),
        ("portfolio,depth=3", UnknownOptionError, "unknown option of drafter 'portfolio'"),
        ("portfolio(draft;auto)", OptionError, "has 'auto' as a member; name single drafters"),
        ("portfolio(none)", OptionError, "has 'none' as a member"),
        ("portfolio(draft;portfolio(draft))", OptionError, "has 'portfolio' as a member"),
        ("portfolio(draft;drafft)", UnknownOptionError, "unknown drafter 'drafft'; did you mean 'draft'"),
        ("portfolio(draft,depht=3)", UnknownOptionError, "unknown option of drafter 'draft' 'depht'"),
        ("auto,num_speculative_tokens=3", UnknownOptionError, "unknown option of drafter 'auto'"),
        ("auto:folder", OptionError, "drafter 'auto' takes no path"),
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


def test_quotes_keep_commas_in_paths_and_values(target: MarkovModel, loaded: list[str]) -> None:
    drafter = from_spec('draft:"a,b/c=d",num_speculative_tokens=3', target)
    assert drafter.limits.depth == 3
    assert from_spec('"draft:x,y",branching="2-2"', target).limits.width == 2
    assert loaded == ["a,b/c=d float64 cpu", "x,y float64 cpu"]


@pytest.mark.parametrize("word", KINDS)
def test_the_table_of_words_has_the_options_of_the_drafters(word: str) -> None:
    """With their defaults, where these are numbers; three are options of the word draft alone."""
    kind = KINDS[word]
    made = {"draft": DraftModel, "cascade": Cascade}.get(word) or dotted(kind.made)
    parts = {"draft": {"model", "ids"}, "cascade": {"drafter", "middle"}}.get(word, {*kind.parts})
    found = [*inspect.signature(made).parameters.items()]
    found += [each for part in kind.parts.values() for each in inspect.signature(dotted(part)).parameters.items()]
    parameters = {name: each.default for name, each in found if name not in {"path", "target", "head", *parts}}
    assert set(kind.options) == set(parameters) | ({"async", "kv_dtype", "draft_vocab"} if word == "draft" else set())
    for name, default in parameters.items():
        if type(default) in (int, float):
            assert float(kind.options[name]) == default, name


def test_help_names_every_kind_and_option() -> None:
    listed = drafter_words()
    for word, kind in KINDS.items():
        told = drafter_described(word)
        assert told["typed"].startswith(word) and listed[told["typed"]] == told["does"] == kind.meaning
        options = [f",{name}={value}" for name, value in kind.options.items()]
        assert told.get("options", "") == "\n".join(options)
        assert ("train" in told) == (word in trained_kinds())
    assert next(iter(listed)) == "auto" and listed["portfolio(A;B;...)"] == drafter_described("portfolio")["does"]
    with pytest.raises(UnknownOptionError, match="unknown drafter 'eagl'; did you mean 'eagle'"):
        drafter_described("eagl")


OWN = """
from truedraft.core.budget import Budget
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters import Drafter


class Mine(Drafter):
    name = "mine"

    def __init__(self, target, depth: int = 1, share: float = 0.5, loud: bool = False, word: str = "", sizes=()):
        if depth == 0:
            raise ZeroDivisionError("no depth")
        self.limits = Budget(depth, 1, depth)
        self.given = (target.vocab_size, depth, share, loud, word, sizes)

    kinds = frozenset({DrawKind.DETERMINISTIC})

    def propose(self, batch, budgets, noise):
        return [Proposal.empty() for _ in batch]


class Nameless(Mine):
    name = None


class Half(Drafter):
    name = "half"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, of a name that no other test imports."""
    (tmp_path / "own_drafters_here").mkdir()
    (tmp_path / "own_drafters_here" / "first.py").write_text(OWN)
    (tmp_path / "own_drafters_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    return "own_drafters_here.first"


def test_a_drafter_of_the_users_own(own: str, target: MarkovModel) -> None:
    words = f'{own}:Mine,depth=3,share=0.25,loud=true,word=7,sizes="(1, 2)"'
    drafter = from_spec(words, target)
    assert drafter.name == "mine"
    assert drafter.given == (6, 3, 0.25, True, "7", (1, 2))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("{}:Mine,deph=3", UnknownOptionError, "did you mean 'depth'"),
        ("{}:Mine,depth=x", OptionError, "depth must be a whole number, got 'x'"),
        ("{}:Mine,loud=yes", OptionError, "loud must be true or false, got 'yes'"),
        ("{}:Mine,depth=0", OptionError, r"cannot be made \(ZeroDivisionError: no depth\)"),
        ("{}:Yours", OptionError, "has no such name"),
        ("{}:Budget", OptionError, "Budget as a type; name a class that extends"),
        ("{}:Half", OptionError, "cannot be made .*abstract"),
        ("{}:Nameless", OptionError, "needs a name"),
        ("own_drafters_broken:Mine", OptionError, r"cannot be imported \(ZeroDivisionError: division by zero\)"),
        (
            "own_drafters_nowhere:Mine",
            UnknownOptionError,
            "'own_drafters_nowhere', and no module of that name can.*MODULE:CLASS",
        ),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(
    own: str, target: MarkovModel, spec: str, kind: type[TruedraftError], words: str
) -> None:
    with pytest.raises(kind, match=words) as refused:
        from_spec(spec.format(own), target)
    assert "\n" not in str(refused.value)
