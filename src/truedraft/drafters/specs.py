"""Drafters by name: the one place where words become drafters, and where help takes its list of them from.

Loads nothing heavy before a drafter is made.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import truedraft.drafters
from truedraft.drafters.registry import ORDER, find_drafters
from truedraft.errors import (
    CompositionError,
    ModelNotFoundError,
    OptionError,
    UnknownOptionError,
    UnsupportedModelError,
    errors_about,
)
from truedraft.files import refuse_lost_model, user_path
from truedraft.models.embedded import embedded_heads
from truedraft.options import Words, called, read_whole

if TYPE_CHECKING:
    from truedraft.core.rank_tree import RankTree
    from truedraft.drafters.base import Drafter
    from truedraft.drafters.draft_model import DraftModel
    from truedraft.drafters.portfolio import Portfolio
    from truedraft.models.base import LanguageModel

_COUNTED = "counted"
_AUTO, _PORTFOLIO, _NONE = "auto", "portfolio", "none"
_MOST_OF_A_KIND = 2
_STORED = 1 << 20
# Of a target that may draft for itself in `auto`: with 3 MB a forward of 4 bits takes three quarters of its own, and as
# long as what surrounds it; with 31 MB half of it (benchmarks/results/self_draft.json).
_LEAST_OWN_BYTES = 16 << 20
# The same beside a trained draft model or heads: with 269 MB, SmolLM2's, it gained 4 % where answers are sampled and
# lost 1 % where they are greedy (benchmarks/results/smollm2_drafters.json).
_LEAST_OWN_BYTES_BESIDE = 128 << 20


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A kind of drafters, as it is typed.

    Attributes:
        made: the name of its class in `truedraft.drafters`, or a function. Options are parameters of these and of
            `parts`, and are read as they are annotated; parameters called `words`, `path`, `target` and `drafters_dir`
            are given those.
        path: what the path behind its word is, as "DIR"; None where it takes none.
        options: its options, each with a value as it is typed: the default, or an example of what else there is.
        meaning: what it does, in a phrase.
        parts: of the class, parameters that are no options, and what makes them.
        widest: options that leave a controller room to decide, as `auto` takes them.
        paths: what a plan tries behind its word where no path is given.
        members: what the drafters in parentheses behind its word are, as "A;B"; "" where it takes none.
    """

    made: str | Callable[..., Drafter]
    path: str | None
    options: Mapping[str, str]
    meaning: str
    parts: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    widest: Mapping[str, str] = field(default_factory=dict)
    paths: Sequence[str] = ()
    members: str = ""

    def make(self, words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path] = ()) -> Drafter:
        """The drafter, from a word whose options are known; its members may lie in folders of drafters."""
        made = getattr(truedraft.drafters, self.made) if isinstance(self.made, str) else self.made
        given = {"words": words, "path": words.path, "target": target, "drafters_dir": drafters_dir}
        drafter: Drafter = called(made, words.options, given, self.parts)
        return drafter

    def typed(self, word: str) -> str:
        """How it is typed, without options."""
        path = "" if self.path is None else f"[:{self.path}]"
        return f"{word}({self.members})" if self.members else word + path


def from_spec(
    spec: str,
    target: LanguageModel,
    drafters_dir: Sequence[str | Path] = (),
    *,
    tell: Callable[[str], None] = warnings.warn,
) -> Drafter:
    """Make a drafter from its word, as `--drafter` takes it: `KIND[:PATH][,option=value]...`.

    `KINDS` has the kinds with their options. `auto` is prompt lookup, `self:int4` and the trained drafters that belong
    to the target, see `auto_members`; `portfolio(A;B;...)` are those that you name; a controller chooses among them at
    each step; `cascade(A;B)` drafts with B, whose own tokens A drafts. `MODULE:CLASS` is a drafter of the user's own,
    see `truedraft.drafters.own`. Double quotes keep commas, semicolons and parentheses in a path or a value:
    `draft:"a,b",num_speculative_tokens=3`.

    Args:
        spec: the word.
        target: that it drafts for.
        drafters_dir: folders of drafters where `auto`, and kinds without a path, look, too.
        tell: given a sentence about each drafter that belongs to the target and that `auto` cannot use.

    Raises:
        UnknownOptionError: a word or an option that does not exist; names the nearest valid one.
        OptionError: an unusable value.
        ModelError: the draft model or the heads cannot be loaded.
        CompositionError: the draft does not share the target's tokenizer, or the heads are for another target.
    """
    with errors_about("drafter"):
        words = Words.parse("drafter", spec)
        if words.kind == _AUTO:
            words.check(())
            return _auto(target, drafters_dir, tell)
        made = _portfolio if words.kind == _PORTFOLIO else _made
        drafter = made(words, target, drafters_dir)
        drafter.check(target)
    return drafter


def draft_from_spec(
    spec: str,
    target: LanguageModel,
    drafters_dir: Sequence[str | Path] = (),
    *,
    tell: Callable[[str], None] = warnings.warn,
) -> DraftModel | None:
    """The draft model that a word names, for what can use nothing else, such as beam search.

    `none` is none; `auto` is the newest one that was trained for the target, and none where there is none.

    Args:
        spec: the word.
        target: that it drafts for.
        drafters_dir: folders of drafters where `auto`, and `draft` without a path, look, too.
        tell: given a sentence where the target's fingerprint cannot be known.

    Raises:
        OptionError: it names another kind of drafter, or options of one that drafts in another way.
        TruedraftError: as of `from_spec`.
    """
    with errors_about("drafter"):
        words = Words.parse("drafter", spec)
        if words.kind == _AUTO:
            words.check(())
            found = [each for each in find_drafters(target, drafters_dir, tell) if each.kind == "draft"]
            if not found:
                return None
            words = Words("drafter", "draft", str(found[0].folder), {})
        elif words.kind == _NONE:
            words.check(())
            return None
        elif words.kind != "draft":
            raise OptionError(f"must be draft:MODEL, none or auto for a beam search, got {spec!r}", field="drafter")
        _unbranched(words)
        drafter = _draft_model(_with_trained(words, target, drafters_dir), target)
        drafter.check(target)
    return drafter


def _unbranched(words: Words) -> None:
    words.check(KINDS["draft"].options, takes_path=True)
    if "async" in words.options:
        raise OptionError("async is of drafts that are judged as chains, and a beam search has none; leave it out")
    for name in ("branching", "chains", "min_probability"):
        if name in words.options:
            raise OptionError(
                f"{name} is of drafted trees, and a beam search drafts by beams of its own; leave it out and give "
                "num_speculative_tokens"
            )


_COMPOSED = {
    "auto": "whatever fits the target and pays at each step: prompt-lookup; self:int4, unless the target is small or "
    "has 4 bits itself, whose weights are made when a step first drafts with them; the MTP layer that its checkpoint "
    "brings along; and the trained drafters that belong to the target and measured a gain, found in the folder "
    "drafters of its own folder, in --drafters-dir, among those that truedraft train made here, among installed "
    "packages of drafters, and among those that ship with truedraft",
    "portfolio(A;B;...)": "the same among drafters that you name, as portfolio(draft;prompt-lookup)",
    "MODULE:CLASS": "a drafter of your own, installed or in this folder; options are those of its constructor",
}


def drafter_words() -> dict[str, str]:
    """How each kind of drafters is typed, without options, and what it does."""
    auto, *others = _COMPOSED.items()
    return dict([auto, *((kind.typed(word), kind.meaning) for word, kind in KINDS.items()), *others])


def drafter_described(word: str) -> dict[str, str]:
    """What is told of one kind: how it is typed, what it does, and its options.

    Raises:
        UnknownOptionError: there is no such kind; names the nearest that there is.
    """
    composed = {name.partition("(")[0]: name for name in _COMPOSED}
    if word in composed:
        return {"typed": composed[word], "does": _COMPOSED[composed[word]]}
    if word not in KINDS:
        raise UnknownOptionError.nearest("drafter", word, [*composed, *KINDS])
    kind = KINDS[word]
    options = "\n".join(f",{name}={value}" for name, value in kind.options.items())
    trained = {"train": f"truedraft train {word} --help"} if word in ORDER else {}
    return {"typed": kind.typed(word), "does": kind.meaning} | ({"options": options} if options else {}) | trained


def check_drafter_words(spec: str) -> None:
    """Refuse words that name no drafter, as far as that is known without loading anything.

    Raises:
        OptionError: there is no such kind, it has no such option, or it takes no path or no members.
        ModelNotFoundError: a path leads nowhere.
    """
    words = Words.parse("drafter", spec)
    for member in words.members:
        check_drafter_words(member)
    kind = KINDS.get(words.kind)
    if words.kind in (_AUTO, _PORTFOLIO):
        words.check((), takes_members=words.kind == _PORTFOLIO)
    elif kind is not None:
        words.check(kind.options, takes_path=kind.path is not None, takes_members=bool(kind.members))
        if words.path is not None and kind.path in ("DIR", "MODEL"):
            refuse_lost_model(words.path)
            if kind.path == "DIR" and "/" not in words.path and not user_path(words.path, ModelNotFoundError).exists():
                raise ModelNotFoundError(f"there is no folder {words.path!r} of a {words.kind} drafter; check the path")
    elif words.path is None and not Path(words.kind).expanduser().exists() and not {*"./"} & {*words.kind}:
        raise _unknown(words)


def _unknown(words: Words) -> UnknownOptionError:
    valid = (_AUTO, *KINDS, f"{_PORTFOLIO}(A;B)", "MODULE:CLASS")
    is_class = words.path is not None and words.path.isidentifier()
    also = ", and no module of that name can be imported" if is_class else ""
    return UnknownOptionError.nearest("drafter", words.kind, valid, also)


def _auto(target: LanguageModel, drafters_dir: Sequence[str | Path], tell: Callable[[str], None]) -> Portfolio:
    """What `auto` is: see `auto_members`."""
    from truedraft.drafters.portfolio import Portfolio

    return Portfolio([drafter for _, drafter in auto_members(target, drafters_dir, tell)])


def auto_members(
    target: LanguageModel,
    drafters_dir: Sequence[str | Path] = (),
    tell: Callable[[str], None] = warnings.warn,
    most: int = _MOST_OF_A_KIND,
) -> list[tuple[Words, Drafter]]:
    """The drafters that `auto` chooses among, with the words that make each.

    These are the target with 4-bit weights, where it can have such a copy and is not so small that it could not pay;
    the MTP layer that its files bring along; the newest of each kind that was trained for it and measured a gain; and
    prompt lookup.

    Args:
        target: that they draft for.
        drafters_dir: folders of drafters to look into, too.
        tell: given a sentence about each that cannot be used, or that brought too little.
        most: of a kind that are taken.
    """
    members: list[tuple[Words, Drafter]] = []
    taken: Counter[str] = Counter()
    for words in _trained_words(target, drafters_dir, tell):
        if taken[words.kind] == most:
            continue
        try:
            drafter = KINDS[words.kind].make(words, target)
            drafter.check(target)
        except Exception as error:  # whatever is wrong with it, the others can draft
            named = words.kind if words.path is None else f"{words.kind}:{words.path}"
            tell(f"the drafter {named} is left out: {' '.join(str(error).split())}")
            continue
        taken[words.kind] += 1
        members.append((words, drafter))
    least = _LEAST_OWN_BYTES_BESIDE if taken.keys() - {"ngram"} else _LEAST_OWN_BYTES
    # Sampled drafts come first: their draws stand first where proposals are merged.
    own = _own_member(target, tell) if target.weight_bytes >= least else []
    lookup = Words("drafter", "prompt-lookup", None, KINDS["prompt-lookup"].widest)
    return [*own, *members, (lookup, KINDS["prompt-lookup"].make(lookup, target))]


def _own_member(target: LanguageModel, tell: Callable[[str], None]) -> list[tuple[Words, Drafter]]:
    """The target with 4-bit weights, where it can have such a copy."""
    words = Words("drafter", "self", "int4", KINDS["self"].widest)
    try:
        drafter = KINDS["self"].make(words, target)
        if drafter.model is not None:
            drafter.model.check_room()
        return [(words, drafter)]
    except UnsupportedModelError:
        return []  # such a target has no copy of fewer bits, and nobody asked for one
    except Exception as error:
        tell(f"the drafter self:int4 is left out: {' '.join(str(error).split())}")
        return []


def _trained_words(
    target: LanguageModel, drafters_dir: Sequence[str | Path], tell: Callable[[str], None]
) -> list[Words]:
    """Of what was trained for a target and measured a gain, and of the MTP layer that it brings along."""
    from truedraft.models.mtp import brings_mtp

    words = [Words("drafter", "mtp", None, KINDS["mtp"].widest)] if brings_mtp(target) else []
    for found in find_drafters(target, drafters_dir, tell):
        if found.brings_too_little:
            tell(
                f"the drafter {found.kind}:{found.folder} is left out: it brought {found.most_tokens_per_call:.2f} "
                "tokens per target call at the end of its training, which cannot pay; train it longer, or name it with "
                "--drafter"
            )
            continue
        words.append(Words("drafter", found.kind, str(found.folder), KINDS[found.kind].widest))
    return words


def _portfolio(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Portfolio:
    """The drafters that are named.

    Raises:
        TruedraftError: one cannot be made, or is none that a portfolio can have.
    """
    from truedraft.drafters.portfolio import Portfolio

    words.check((), takes_members=True)
    members = _members(words, "portfolio(draft;prompt-lookup): each step chooses among them, or to draft nothing")
    return Portfolio([_made(member, target, drafters_dir) for member in members])


def _members(words: Words, example: str) -> list[Words]:
    """The words of a drafter's members.

    Raises:
        OptionError: one is no single drafter.
    """
    members = [Words.parse("drafter", member) for member in words.members]
    for member in members:
        if member.kind in (_AUTO, _PORTFOLIO, _NONE):
            raise OptionError(
                f"drafter {words.kind!r} has {member.kind!r} as a member; name single drafters, as in {example}"
            )
    return members


def _cascade(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Drafter:
    """Of several members the first two make the innermost cascade, and each further one verifies what was before.

    Raises:
        TruedraftError: one cannot be made, or they do not go together.
    """
    from truedraft.drafters.cascade import Cascade

    example = "cascade(prompt-lookup;draft): the first one drafts, and the next one verifies before the target does"
    members = _members(words, example)
    if len(members) < 2:
        raise OptionError("drafter 'cascade' needs two members or more, as in cascade(prompt-lookup;draft)")
    if members[0].options.get("async") == "1":
        raise CompositionError(
            "'draft' cannot draft inside a cascade with async: no round asks for what was drafted ahead; leave it out"
        )
    lengths = [_written_by(member) for member in members[1:]]
    if words.options:
        lengths[-1] = {name: read_whole(name, value) for name, value in words.options.items()}
    drafter, *middles = (_made(member, target, drafters_dir) for member in members)
    for middle, length in zip(middles, lengths, strict=True):
        drafter = Cascade(drafter, middle, **length)
    return drafter


def _written_by(middle: Words) -> dict[str, int]:
    """How many tokens a member that verifies writes, where it says so; it draws them as a chain, by its own model.

    Raises:
        OptionError: it has other options, which would do nothing.
    """
    for name in middle.options:
        if name != "num_speculative_tokens":
            raise OptionError(
                f"{name} of {middle.kind!r} does nothing behind the first member of a cascade, which writes one chain "
                "there; leave it out"
            )
    return {name: read_whole(name, value) for name, value in middle.options.items()}


def _made(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Drafter:
    kind = KINDS.get(words.kind)
    if kind is None:
        from truedraft.drafters.own import own_drafter

        own = None if words.members else own_drafter(words.kind, words.path, words.options, target)
        if own is None:
            raise _unknown(words)
        return own
    words.check(kind.options, takes_path=kind.path is not None, takes_members=bool(kind.members))
    return kind.make(_with_trained(words, target, drafters_dir), target, drafters_dir)


def _with_trained(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Words:
    """A word without a path names the newest of its kind that was trained for the target, if any was."""
    if words.kind not in ORDER or words.path is not None:
        return words
    trained = next((each for each in find_drafters(target, drafters_dir) if each.kind == words.kind), None)
    return words if trained is None else replace(words, path=str(trained.folder))


def _store(path: str | None, target: Any, max_tokens: int = _STORED) -> Any:
    """Of a suffix cache, kept in a file where there is a path."""
    from truedraft.drafters.suffix import SuffixFile, SuffixStore

    if max_tokens < 1:
        raise OptionError(f"max_tokens must be 1 or more, got {max_tokens}")
    file = None
    if path is not None:
        ids = f"{target.vocab_size} ids" if target.tokenizer is None else target.tokenizer.fingerprint
        file = SuffixFile(Path(path).expanduser(), ids, max_tokens)
    return SuffixStore(max_tokens, file)


def _loading(path: str | None, target: LanguageModel) -> Callable[[], LanguageModel]:
    """How the draft model that a word names is loaded: as the target was."""
    from truedraft.machine import dtype_name
    from truedraft.models.loading import load_model

    dtype = dtype_name(target.dtype)
    fast = bool(target.fast_paths)  # who turned them off for the target wants to see plain forwards
    return partial(load_model, path or "embedded:draft", dtype=dtype, device=str(target.device), fast_paths=fast)


def _shared_ids(path: str | None, target: LanguageModel) -> LanguageModel:
    """The draft model that a word names, in the target's ids."""
    from truedraft.models.translated import TranslatedModel

    model = _loading(path, target)()
    ours, theirs = model.tokenizer, target.tokenizer
    if ours is not None and theirs is not None and not ours.same_vocabulary(theirs):
        return TranslatedModel(model, target)
    return model


def _draft_model(words: Words, target: LanguageModel) -> DraftModel:
    from truedraft.drafters.draft_model import DraftModel

    given = {"path": words.path, "target": target}
    drafter: DraftModel = called(DraftModel, words.options, given, {"model": _shared_ids})
    return drafter


def _draft_or_parallel(words: Words, target: LanguageModel) -> Drafter:
    from truedraft.drafters.parallel import DraftProcess, ParallelDraft, ahead_drafter

    options = dict(words.options)
    typed = options.pop("async", "0")
    if typed not in ("0", "1"):
        raise OptionError(f"async must be 1 (another process drafts ahead) or 0, got {typed!r}")
    draft = _draft_model(replace(words, options=options), target)
    if typed == "0":
        return draft
    load = _loading(words.path, target)
    make = partial(ahead_drafter, load, draft.limits.depth, draft.limits.min_probability)
    return ParallelDraft(draft, DraftProcess(make))


def _fewer_bits(path: str | None, target: LanguageModel) -> LanguageModel:
    bits = {"int8": 8, "int4": 4}.get(path or "")
    if bits is None:
        raise OptionError(f"drafter 'self' needs the width of its weights, self:int8 or self:int4, got {path!r}")
    return target.quantized(bits)


def _table(path: str | None) -> Any:
    from truedraft.drafters.ngram import NgramTable

    if path is None:
        raise OptionError("drafter 'ngram' needs its table: ngram:FILE, as truedraft train ngram wrote it")
    return NgramTable.open(path)


def _head_of(kind: str) -> Callable[[str | None, LanguageModel], Any]:
    """Loads a head of a kind from a folder, or the one that was trained for the target."""

    def load(path: str | None, target: LanguageModel) -> Any:
        from truedraft.heads import DFlashHead, DSparkHead, Eagle3Head, RedrafterHead
        from truedraft.heads.layers import LayerHead
        from truedraft.heads.peagle import PEagleHead

        every: Sequence[type[Any]] = (RedrafterHead, Eagle3Head, DFlashHead, DSparkHead, PEagleHead)
        heads = {each.kind: each for each in every}
        head = heads[kind].load(_heads_folder(_trained_path(kind, path, target)))
        if isinstance(head, LayerHead):
            head.config = head.config.at_usual_layers(target.shown_layers)
        return head

    return load


def _mtp_head(path: str | None, target: LanguageModel) -> Any:
    from truedraft.heads.mtp import MtpHead

    return MtpHead.of(target, path)


def _medusa(
    path: str | None,
    target: LanguageModel,
    nodes: int | None = None,
    branching: Sequence[int] | None = None,
    tree: str | None = None,
) -> Any:
    from truedraft.core.rank_tree import RankTree
    from truedraft.drafters.heads.calibration import GREEDY, SAMPLED
    from truedraft.drafters.heads.guess_trees import fixed_trees
    from truedraft.drafters.heads.medusa import Medusa
    from truedraft.heads import MedusaHeads

    if branching is not None and tree is not None:
        raise OptionError("drafter 'medusa' takes branching or tree, not both")
    heads = MedusaHeads.load(_heads_folder(_trained_path("medusa", path, target)))
    if branching is None and tree is None:
        return Medusa(heads, nodes=nodes)
    if tree == _COUNTED:
        return Medusa(heads, fixed_trees(heads.record.trees), nodes=nodes)
    ranks = RankTree.cartesian(branching or ()) if tree is None else _listed(tree)
    trees = fixed_trees({GREEDY: ranks, SAMPLED: ranks})
    return Medusa(heads, trees, nodes=len(ranks) if nodes is None else nodes)


def _trained_path(kind: str, path: str | None, target: LanguageModel) -> str:
    """Where heads of a kind lie; `_with_trained` has looked for them.

    Raises:
        CompositionError: there are none for the target.
    """
    if path is None:
        raise CompositionError(
            f"no {kind!r} drafter was trained for {target.name!r}; train one by truedraft train {kind} --model "
            f"{target.name}, look elsewhere by --drafters-dir DIR, or name one as {kind}:DIR"
        )
    return path


def _heads_folder(path: str) -> str | Path:
    """Where heads lie; the embedded ones are `embedded:medusa` and `embedded:redrafter`."""
    prefix = "embedded:"
    return embedded_heads(path.removeprefix(prefix)) if path.startswith(prefix) else path


def _listed(file: str) -> RankTree:
    """A tree that somebody wrote by hand."""
    from truedraft.core.rank_tree import RankTree

    try:
        paths = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # the last: the home of nobody, or lists without end
        raise OptionError(f"cannot read the tree {file!r} ({error}); give a JSON list of rank paths") from error
    whole = isinstance(paths, list) and all(
        isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
    )
    if not whole or not paths:
        raise OptionError(f"the tree {file!r} is no list of rank paths; write for example [[0], [0, 0], [1]]")
    return RankTree.listed(paths)


_OF_LEVELS = {"num_speculative_tokens": "7", "branching": "3-2-1", "min_probability": "0", "nodes": "16", "beams": "8"}
KINDS: Mapping[str, DrafterKind] = {
    "none": DrafterKind("NoDrafter", None, {}, "nothing is drafted, which is plain decoding"),
    "prompt-lookup": DrafterKind(
        "PromptLookup",
        None,
        {"num_speculative_tokens": "6", "max_ngram": "4", "min_ngram": "2"},
        "copies what followed the last time the text ended like this",
        widest={"num_speculative_tokens": "12"},
    ),
    "suffix": DrafterKind(
        "SuffixDrafter",
        "FILE",
        {"num_speculative_tokens": "12", "nodes": "24", "max_tokens": str(_STORED)},
        "a tree of what followed where the text's ending occurred before, in it or in any text that was answered: the "
        "latest max_tokens are kept, between runs in FILE",
        parts={"store": _store},
        widest={"num_speculative_tokens": "16", "nodes": "32"},
    ),
    "lookahead": DrafterKind(
        "Lookahead",
        None,
        {"window": "2", "ngram": "5", "candidates": "2"},
        "n-grams that the target itself turns up while it guesses ahead in a window of so many columns, beside what it "
        "judges; no second model and no training, and more rows in each forward",
    ),
    "draft": DrafterKind(
        _draft_or_parallel,
        "MODEL",
        {
            "num_speculative_tokens": "4",
            "chains": "1",
            "branching": "3-2-1",
            "min_probability": "0",
            "async": "1",
        },
        "a smaller model, best with the same tokenizer, without MODEL the one trained for the target, or the embedded "
        "one: a chain, several chains that are merged where they agree, or by branching a tree of so many guesses at "
        "each depth; no further below a token of less than min_probability; with async=1 another process drafts on "
        "while the target verifies",
        widest={"num_speculative_tokens": "12"},
    ),
    "self": DrafterKind(
        "SelfDraft",
        "int8|int4",
        {"num_speculative_tokens": "4"},
        "the target itself with weights of 8 or 4 bits, which reads the keys and values of the target: no second model "
        "and no training",
        parts={"model": _fewer_bits},
        widest={"num_speculative_tokens": "8"},
        paths=("int8", "int4"),
    ),
    "reencoded": DrafterKind(
        "ReencodedDraft",
        "MODEL",
        {"num_speculative_tokens": "4"},
        "a smaller model with another tokenizer: it writes so many tokens of its own, and their text is encoded again; "
        "draft:MODEL draws from the tokens that both know",
        parts={"model": lambda path, target: _loading(path, target)()},
        widest={"num_speculative_tokens": "8"},
    ),
    "ngram": DrafterKind(
        "NgramDrafter",
        "FILE",
        {"num_speculative_tokens": "4", "nodes": "7", "order": "2"},
        "a table of which token usually follows the last few, as truedraft train ngram counts it, without FILE the one "
        "counted for the target: a tree of the "
        "likeliest; order reads n-grams of so many tokens at most",
        parts={"table": _table},
        widest={"nodes": "15"},
    ),
    "cascade": DrafterKind(
        _cascade,
        None,
        {"num_speculative_tokens": "8"},
        "B drafts so many tokens, and A drafts these for it, as in cascade(prompt-lookup;draft): B has a model that "
        "verifies, draft or self, and A reads tokens alone, or is a cascade",
        widest={"num_speculative_tokens": "12"},
        members="A;B",
    ),
    "medusa": DrafterKind(
        _medusa,
        "DIR",
        {"nodes": "16", "branching": "4-3-2", "tree": "counted|FILE"},
        "heads on the target's last vector, without DIR those trained for the target: at each "
        "step a tree of as many nodes as pay here, or as you say; or the same tree at all steps, of so many ranks at "
        "each depth, the one that was counted in training, or a JSON list of rank paths as [[0], [0, 0], [1]]",
        widest={"nodes": "48"},
    ),
    "redrafter": DrafterKind(
        "Redrafter",
        "DIR",
        {"beams": "8", "length": "4", "nodes": "16", "sampled": "true"},
        "one recurrent head on that vector, without DIR the one trained for the target: beams, "
        "merged and cut to the likeliest nodes, in sizes that pay here, or as you say; from temperature 0.8 on they "
        "are drawn, at every one with sampled=true and at none with sampled=false",
        parts={"head": _head_of("redrafter")},
        widest={"beams": "4", "nodes": "16"},
    ),
    "eagle": DrafterKind(
        "Eagle3",
        "DIR",
        _OF_LEVELS | {"num_speculative_tokens": "5"},
        "an EAGLE-3 head on vectors of several of the target's layers: a chain of so many tokens, a tree with so many "
        "at each node, cut below those that it gives less than min_probability, or for greedy requests the likeliest "
        "tree of so many nodes, of which beams are open at each level",
        parts={"head": _head_of("eagle")},
        widest={"num_speculative_tokens": "8"},
    ),
    "dflash": DrafterKind(
        "DFlash",
        "DIR",
        _OF_LEVELS,
        "a block drafter (DFlash) on vectors of several of the target's layers, without DIR the one trained for the "
        "target: all tokens of a draft come from one pass; options as of eagle",
        parts={"head": _head_of("dflash")},
    ),
    "dspark": DrafterKind(
        "DSpark",
        "DIR",
        _OF_LEVELS | {"min_acceptance": "0"},
        "a block drafter whose tokens know the ones before them (DSpark), without DIR the one trained for the target: "
        "options as of eagle, and no token that is reached and accepted with less than min_acceptance by its "
        "confidence head",
        parts={"head": _head_of("dspark")},
    ),
    "p-eagle": DrafterKind(
        "PEagle",
        "DIR",
        _OF_LEVELS | {"num_speculative_tokens": "8"},
        "a P-EAGLE head, which guesses all tokens in one forward, without DIR the one trained for the target; options "
        "are those of eagle",
        parts={"head": _head_of("p-eagle")},
        widest={"num_speculative_tokens": "8"},
    ),
    "mtp": DrafterKind(
        "Mtp",
        "DIR",
        _OF_LEVELS | {"num_speculative_tokens": "3"},
        "the layer that the target's checkpoint brings along to predict a token further, or one of speculators in DIR; "
        "its output goes round for further tokens, and options are those of eagle",
        parts={"head": _mtp_head},
        widest={"num_speculative_tokens": "6"},
    ),
}
"""The kinds of drafters by their words."""
