"""Drafters by name: parses specifications, and lists them for the help text. Imports nothing heavy before use."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.core.budget import Budget
from truedraft.drafters.kinds import KINDS, Kind, trained_kinds
from truedraft.drafters.registry import find_drafters, read_draft_ids
from truedraft.errors import (
    CompositionError,
    ModelNotFoundError,
    OptionError,
    TruedraftError,
    UnknownOptionError,
    UnsupportedModelError,
    errors_about,
)
from truedraft.files import refuse_lost_model, user_path
from truedraft.options import Words, called, imported_module, read_whole

if TYPE_CHECKING:
    from torch import Tensor

    from truedraft.drafters.base import Drafter
    from truedraft.drafters.draft_model import DraftModel
    from truedraft.drafters.portfolio import Portfolio
    from truedraft.models.base import LanguageModel

_AUTO, _PORTFOLIO, _NONE = "auto", "portfolio", "none"
_MOST_OF_A_KIND = 2
_STORED = 1 << 20
# At 3 MB a 4-bit forward takes 75 % of the time of a full one, and as long as the rest of the step; at 31 MB it takes
# 50 % (benchmarks/results/self_draft.json).
_LEAST_OWN_BYTES = 16 << 20
# The same together with a trained draft model or heads: at 269 MB, SmolLM2's size, it gained 4 % for sampled answers
# and lost 1 % for greedy ones (benchmarks/results/smollm2_drafters.json).
_LEAST_OWN_BYTES_BESIDE = 128 << 20


def from_spec(
    spec: str,
    target: LanguageModel,
    drafters_dir: Sequence[str | Path] = (),
    *,
    tell: Callable[[str], None] = warnings.warn,
) -> Drafter:
    """Make a drafter from a specification, as `--drafter` takes it: `KIND[:PATH][,option=value]...`.

    `KINDS` has the kinds with their options. A controller chooses among the drafters of `portfolio(A;B;...)`.
    `cascade(A;B)` drafts with B, which A drafts for. `MODULE:CLASS` is a user's own drafter. Double quotes protect
    commas, semicolons and parentheses: `draft:"a,b",num_speculative_tokens=3`.

    Args:
        drafters_dir: further folders in which `auto`, and kinds without a path, search for drafters.
        tell: called with a sentence for each drafter of the target that `auto` cannot use.

    Raises:
        UnknownOptionError: an unknown kind or option; names the nearest valid one.
        OptionError: an invalid value.
        ModelError: the draft model or the heads cannot be loaded.
        CompositionError: the draft does not share the target's tokenizer, or the heads are for another target.
    """
    with errors_about("drafter"):
        words = Words.parse("drafter", spec)
        if words.kind == _AUTO:
            from truedraft.drafters.portfolio import Portfolio

            words.check(())
            return Portfolio([drafter for _, drafter in auto_members(target, drafters_dir, tell)])
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
    """The draft model of a specification, for methods that need one, such as beam search; arguments as of `from_spec`.

    `none` is None; `auto` is the newest one that was trained for the target, or None. Raises `OptionError` for another
    kind of drafter, or options for other ways of drafting; other errors as of `from_spec`.
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
        _refuse_branched(words)
        drafter = _draft_model(_with_trained(words, target, drafters_dir), target)
        drafter.check(target)
    return drafter


def _refuse_branched(words: Words) -> None:
    words.check(KINDS["draft"].options, takes_path=True)
    if "async" in words.options:
        raise OptionError("async is for drafts that are verified as chains, and a beam search has none; leave it out")
    if "context" in words.options:
        raise OptionError("context is for drafts of single answers, and a beam search reads whole texts; leave it out")
    for name in ("branching", "chains", "min_probability"):
        if name in words.options:
            raise OptionError(
                f"{name} is for drafted trees, and a beam search drafts by beams of its own; leave it out and give "
                "num_speculative_tokens"
            )


_COMPOSED = {
    "auto": "whatever fits the target and pays at each step: prompt-lookup; self:int4, unless the target is small or "
    "has 4 bits itself, with weights made when a step first drafts with them; the MTP layer in its checkpoint; "
    "and the trained drafters that belong to the target and measured a gain, found in the folder "
    "drafters of its own folder, in --drafters-dir, among those that truedraft train made here, among installed "
    "packages of drafters, and among those that ship with truedraft",
    "portfolio(A;B;...)": "the same among drafters that you name, as portfolio(draft;prompt-lookup)",
    "MODULE:CLASS": "a drafter of your own, installed or in this folder; options are those of its constructor",
}


def drafter_words() -> dict[str, str]:
    """The specification and the meaning of each kind of drafter."""
    auto, *others = _COMPOSED.items()
    return dict([auto, *((kind.typed(word), kind.meaning) for word, kind in KINDS.items()), *others])


def drafter_described(word: str) -> dict[str, str]:
    """One kind's specification, meaning and options; raises `UnknownOptionError`, which names the nearest kind."""
    composed = {name.partition("(")[0]: name for name in _COMPOSED}
    if word in composed:
        return {"typed": composed[word], "does": _COMPOSED[composed[word]]}
    if word not in KINDS:
        raise UnknownOptionError.nearest("drafter", word, [*composed, *KINDS])
    kind = KINDS[word]
    options = "\n".join(f",{name}={value}" for name, value in kind.options.items())
    trained = {"train": f"truedraft train {word} --help"} if word in trained_kinds() else {}
    return {"typed": kind.typed(word), "does": kind.meaning} | ({"options": options} if options else {}) | trained


def check_drafter_words(spec: str) -> None:
    """Refuse invalid specifications, as far as possible without loading anything.

    Raises:
        OptionError: an unknown kind or option, or a kind that takes no path or no members.
        ModelNotFoundError: a path does not exist.
    """
    words = Words.parse("drafter", spec)
    for member in words.members:
        check_drafter_words(member)
    kind = KINDS.get(words.kind)
    if words.kind in (_AUTO, _PORTFOLIO):
        words.check((), takes_members=words.kind == _PORTFOLIO)
    elif kind is not None:
        words.check(kind.options, takes_path=kind.path is not None, takes_members=bool(kind.members))
        if words.path is not None and kind.path == "MODEL":
            refuse_lost_model(words.path)
        elif words.path is not None and kind.path == "DIR" and _is_lost(words.path):
            raise ModelNotFoundError(f"there is no folder {words.path!r} of a {words.kind} drafter; check the path")
    elif words.path is None and not Path(words.kind).expanduser().exists() and not {*"./"} & {*words.kind}:
        raise _unknown(words)


def _is_lost(path: str) -> bool:
    return not path.startswith("embedded:") and not user_path(path, ModelNotFoundError).exists()


def _unknown(words: Words) -> UnknownOptionError:
    valid = (_AUTO, *KINDS, f"{_PORTFOLIO}(A;B)", "MODULE:CLASS")
    is_class = words.path is not None and words.path.isidentifier()
    also = ", and no module of that name can be imported" if is_class else ""
    return UnknownOptionError.nearest("drafter", words.kind, valid, also)


def auto_members(
    target: LanguageModel,
    drafters_dir: Sequence[str | Path] = (),
    tell: Callable[[str], None] = warnings.warn,
    most: int = _MOST_OF_A_KIND,
) -> list[tuple[Words, Drafter]]:
    """The drafters that `auto` chooses among, each with its specification.

    These are its 4-bit weights, if it is large enough to gain; the MTP layer in its checkpoint; the newest `most`
    drafters of each kind that were trained for it and measured a gain, which see no more of a text than in training;
    and prompt lookup.
    """
    members: list[tuple[Words, Drafter]] = []
    taken: Counter[str] = Counter()
    for words in _trained_words(target, drafters_dir, tell):
        if taken[words.kind] == most:
            continue
        try:
            words, drafter = _bounded_if_possible(words, target)
            drafter.check(target)
        except Exception as error:  # a failing drafter must not prevent the others
            tell(_left_out(words, error))
            continue
        taken[words.kind] += 1
        members.append((words, drafter))
    least = _LEAST_OWN_BYTES_BESIDE if taken.keys() - {"ngram"} else _LEAST_OWN_BYTES
    # Sampled drafts first, so that their draws are first in merged proposals.
    own = _own_member(target, tell) if target.weight_bytes >= least else []
    lookup = Words("drafter", "prompt-lookup", None, KINDS["prompt-lookup"].widest)
    return [*own, *members, (lookup, KINDS["prompt-lookup"].make(lookup, target))]


def _bounded_if_possible(words: Words, target: LanguageModel) -> tuple[Words, Drafter]:
    """A member with the `context` that its training had, or without where its caches cannot drop tokens."""
    try:
        return words, KINDS[words.kind].make(words, target)
    except OptionError as error:
        if error.field != "context":
            raise
    words = replace(words, options={name: value for name, value in words.options.items() if name != "context"})
    return words, KINDS[words.kind].make(words, target)


def _left_out(words: Words, error: Exception) -> str:
    named = words.kind if words.path is None else f"{words.kind}:{words.path}"
    return f"the drafter {named} is left out: {' '.join(str(error).split())}"


def _own_member(target: LanguageModel, notify: Callable[[str], None]) -> list[tuple[Words, Drafter]]:
    words = Words("drafter", "self", "int4", KINDS["self"].widest)
    try:
        drafter = KINDS["self"].make(words, target)
        if drafter.model is not None:
            drafter.model.check_room()
        return [(words, drafter)]
    except UnsupportedModelError:
        return []  # such a target has no quantized copy, and none was requested
    except Exception as error:
        notify(_left_out(words, error))
        return []


def _trained_words(
    target: LanguageModel, drafters_dir: Sequence[str | Path], notify: Callable[[str], None]
) -> list[Words]:
    from truedraft.models.mtp import brings_mtp

    words = [Words("drafter", "mtp", None, KINDS["mtp"].widest)] if brings_mtp(target) else []
    for found in find_drafters(target, drafters_dir, notify):
        if found.brings_too_little:
            notify(
                f"the drafter {found.kind}:{found.folder} is left out: it brought {found.most_tokens_per_call:.2f} "
                "tokens per target call at the end of its training, which cannot pay; train it longer, or name it with "
                "--drafter"
            )
            continue
        kind = KINDS[found.kind]
        options = dict(kind.widest) | (found.bound if "context" in kind.options else {})
        words.append(Words("drafter", found.kind, str(found.folder), options))
    return words


def _portfolio(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Portfolio:
    from truedraft.drafters.portfolio import Portfolio

    words.check((), takes_members=True)
    members = _members(words, "portfolio(draft;prompt-lookup): each step chooses among them, or to draft nothing")
    return Portfolio([_made(member, target, drafters_dir) for member in members])


def _members(words: Words, example: str) -> list[Words]:
    members = [Words.parse("drafter", member) for member in words.members]
    for member in members:
        if member.kind in (_AUTO, _PORTFOLIO, _NONE):
            raise OptionError(
                f"drafter {words.kind!r} has {member.kind!r} as a member; name single drafters, as in {example}"
            )
    return members


def cascade(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Drafter:
    """Make a cascade: each member from the second on verifies the tokens of the one before.

    Raises `TruedraftError` if a member cannot be made, or they are incompatible.
    """
    from truedraft.drafters.cascade import Cascade

    example = "cascade(prompt-lookup;draft): the first one drafts, and the next one verifies before the target does"
    members = _members(words, example)
    if len(members) < 2:
        raise OptionError("drafter 'cascade' needs two members or more, as in cascade(prompt-lookup;draft)")
    if members[0].options.get("async") == "1":
        raise CompositionError(
            "'draft' cannot draft inside a cascade with async: no round uses what was drafted ahead; leave it out"
        )
    lengths = [_written_by(member) for member in members[1:]]
    if words.options:
        lengths[-1] = {name: read_whole(name, value) for name, value in words.options.items()}
    drafter, *middles = (_made(member, target, drafters_dir) for member in members)
    for middle, length in zip(middles, lengths, strict=True):
        drafter = Cascade(drafter, middle, **length)
    return drafter


def _written_by(middle: Words) -> dict[str, int]:
    """The length of a verifying member; refuses other options, which would have no effect."""
    for name in middle.options:
        if name != "num_speculative_tokens":
            raise OptionError(
                f"{name} of {middle.kind!r} has no effect after the first member of a cascade, where it writes one "
                "chain; leave it out"
            )
    return {name: read_whole(name, value) for name, value in middle.options.items()}


def _made(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Drafter:
    kind = KINDS.get(words.kind)
    if kind is None:
        own = None if words.members else own_drafter(words.kind, words.path, words.options, target)
        if own is None:
            raise _unknown(words)
        return own
    words.check(kind.options, takes_path=kind.path is not None, takes_members=bool(kind.members))
    return kind.make(_with_trained(words, target, drafters_dir), target, drafters_dir)


def own_drafter(module: str, name: str | None, options: Mapping[str, str], target: LanguageModel) -> Drafter | None:
    """A user's own drafter, of a class in a module, which may be in the working directory: `MODULE:CLASS`.

    Options are passed by name, parsed by their annotations, otherwise as Python literals. A parameter called `target`
    receives the target. None if there is no such module.

    Raises:
        UnknownOptionError: the constructor has no such option.
        OptionError: the module cannot be imported, has no such drafter, or its constructor failed.
    """
    from truedraft.drafters.base import Drafter

    if name is None or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return None
    found = imported_module(module, "of a drafter")
    if found is None:
        return None
    spec = f"{module}:{name}"
    made = getattr(found, name, None)
    if not isinstance(made, type) or not issubclass(made, Drafter):
        what = "has no such name" if made is None else f"has {name} as a {type(made).__name__}"
        raise OptionError(f"drafter {spec!r}: the module {what}; name a class that extends truedraft.drafters.Drafter")
    parameters = inspect.signature(made).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        known = [each for each in parameters if each != "target"] or ["(none)"]
        for option in options:
            if option not in known:
                raise UnknownOptionError.nearest(f"option of drafter {spec!r}", option, known)
    try:
        drafter = called(made, options, {"target": target})
    except TruedraftError:
        raise
    except Exception as error:
        raise OptionError(f"drafter {spec!r} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(getattr(drafter, "name", None), str) or not isinstance(getattr(drafter, "limits", None), Budget):
        raise OptionError(f"drafter {spec!r} needs a name (a text) and limits (a Budget); see docs/adding_a_drafter.md")
    return drafter


def _with_trained(words: Words, target: LanguageModel, drafters_dir: Sequence[str | Path]) -> Words:
    if words.kind not in trained_kinds() or words.path is not None:
        return words
    trained = next((each for each in find_drafters(target, drafters_dir) if each.kind == words.kind), None)
    return words if trained is None else replace(words, path=str(trained.folder))


def suffix_store(path: str | None, target: Any, max_tokens: int = _STORED) -> Any:
    """The store of a suffix cache, in a file if there is a path."""
    from truedraft.drafters.suffix import SuffixFile, SuffixStore

    if max_tokens < 1:
        raise OptionError(f"max_tokens must be 1 or more, got {max_tokens}")
    file = None
    if path is not None:
        ids = f"{target.vocab_size} ids" if target.tokenizer is None else target.tokenizer.fingerprint
        file = SuffixFile(Path(path).expanduser(), ids, max_tokens)
    return SuffixStore(max_tokens, file)


def _loading(path: str | None, target: LanguageModel, kv_dtype: str = "auto") -> Callable[[], LanguageModel]:
    from truedraft.machine import dtype_name
    from truedraft.models.loading import load_model

    dtype = dtype_name(target.dtype)
    fast = bool(target.fast_paths)  # turned off for the target, they are off for the draft
    place = str(target.device)
    return partial(load_model, path or "embedded:draft", dtype=dtype, device=place, fast_paths=fast, kv_dtype=kv_dtype)


def _shared_ids(path: str | None, target: LanguageModel, kv_dtype: str = "auto") -> LanguageModel:
    from truedraft.models.translated import TranslatedModel

    model = _loading(path, target, kv_dtype)()
    ours, theirs = model.tokenizer, target.tokenizer
    if ours is not None and theirs is not None and not ours.same_vocabulary(theirs):
        return TranslatedModel(model, target)
    return model


def _likeliest_ids(path: str | None, target: LanguageModel, draft_vocab: int | None = None) -> Tensor | None:
    import torch

    if draft_vocab is not None and draft_vocab < 0:
        raise OptionError(f"draft_vocab must be 0 (all ids) or more, got {draft_vocab}")
    ids = None if path is None or draft_vocab == 0 else read_draft_ids(user_path(path), target.vocab_size, draft_vocab)
    return None if ids is None else torch.tensor(ids)


def _draft_model(words: Words, target: LanguageModel) -> DraftModel:
    from truedraft.drafters.draft_model import DraftModel

    given = {"path": words.path, "target": target}
    drafter: DraftModel = called(DraftModel, words.options, given, {"model": _shared_ids, "ids": _likeliest_ids})
    return drafter


def draft_or_parallel(words: Words, target: LanguageModel) -> Drafter:
    """A draft model, with `async=1` in another process."""
    from truedraft.drafters.parallel import DraftProcess, ParallelDraft, ahead_drafter

    options = dict(words.options)
    typed = options.pop("async", "0")
    if typed not in ("0", "1"):
        raise OptionError(f"async must be 1 (another process drafts ahead) or 0, got {typed!r}")
    draft = _draft_model(replace(words, options=options), target)
    if typed == "0":
        return draft
    load = _loading(words.path, target, options.get("kv_dtype", "auto"))
    make = partial(ahead_drafter, load, draft.limits.depth, draft.limits.min_probability, draft.context)
    return ParallelDraft(draft, DraftProcess(make))


def other_model(path: str | None, target: LanguageModel) -> LanguageModel:
    """The named model, in its own token ids."""
    return _loading(path, target)()


def fewer_bits(path: str | None, target: LanguageModel) -> LanguageModel:
    """The target with 8-bit or 4-bit weights."""
    bits = {"int8": 8, "int4": 4}.get(path or "")
    if bits is None:
        raise OptionError(f"drafter 'self' needs the width of its weights, self:int8 or self:int4, got {path!r}")
    return target.quantized(bits)


def ngram_table(path: str | None) -> Any:
    """The n-gram table in a file."""
    from truedraft.drafters.ngram import NgramTable

    if path is None:
        raise OptionError("drafter 'ngram' needs its table: ngram:FILE, as truedraft train ngram wrote it")
    return NgramTable.open(path)


OWN: Mapping[str, Kind] = {
    "none": Kind("truedraft.drafters.base:NoDrafter", None, {}, "nothing is drafted, which is plain decoding"),
    "prompt-lookup": Kind(
        "truedraft.drafters.prompt_lookup:PromptLookup",
        None,
        {"num_speculative_tokens": "6", "max_ngram": "4", "min_ngram": "2"},
        "copies what followed the last time the text ended like this",
        widest={"num_speculative_tokens": "12"},
    ),
    "suffix": Kind(
        "truedraft.drafters.suffix:SuffixDrafter",
        "FILE",
        {"num_speculative_tokens": "12", "nodes": "24", "max_tokens": str(_STORED)},
        "a tree of what followed where the text's ending occurred before, in it or in any text that was answered: the "
        "latest max_tokens are kept, between runs in FILE",
        parts={"store": "truedraft.drafters.specs:suffix_store"},
        widest={"num_speculative_tokens": "16", "nodes": "32"},
    ),
    "lookahead": Kind(
        "truedraft.drafters.lookahead:Lookahead",
        None,
        {"window": "2", "ngram": "5", "candidates": "2"},
        "n-grams that the target itself finds while it guesses ahead in a window of so many columns, in addition to "
        "verification; no second model and no training, and more rows in each forward",
    ),
    "draft": Kind(
        "truedraft.drafters.specs:draft_or_parallel",
        "MODEL",
        {
            "num_speculative_tokens": "4",
            "chains": "1",
            "branching": "3-2-1",
            "min_probability": "0",
            "context": "1024",
            "kv_dtype": "int8",
            "draft_vocab": "8192",
            "async": "1",
        },
        "a smaller model, best with the same tokenizer, without MODEL the one trained for the target, or the embedded "
        "one: a chain, several chains that are merged where they agree, or by branching a tree of so many guesses at "
        "each depth; no further below a token of less than min_probability; of a long text it sees the first and the "
        "last tokens, context in all; kv_dtype is that of its own keys and values; it guesses among the draft_vocab "
        "likeliest ids that its training recorded, 0 for all; with async=1 another process drafts on while the target "
        "verifies",
        widest={"num_speculative_tokens": "12"},
    ),
    "self": Kind(
        "truedraft.drafters.self_draft:SelfDraft",
        "int8|int4",
        {"num_speculative_tokens": "4", "context": "1024"},
        "the target itself with weights of 8 or 4 bits, which reads the keys and values of the target, with context of "
        "so many tokens only: no second model and no training",
        parts={"model": "truedraft.drafters.specs:fewer_bits"},
        widest={"num_speculative_tokens": "8"},
        paths=("int8", "int4"),
    ),
    "reencoded": Kind(
        "truedraft.drafters.reencoded:ReencodedDraft",
        "MODEL",
        {"num_speculative_tokens": "4"},
        "a smaller model with another tokenizer: it writes so many tokens of its own, and their text is encoded again; "
        "draft:MODEL draws from the tokens that both know",
        parts={"model": "truedraft.drafters.specs:other_model"},
        widest={"num_speculative_tokens": "8"},
    ),
    "ngram": Kind(
        "truedraft.drafters.ngram:NgramDrafter",
        "FILE",
        {"num_speculative_tokens": "4", "nodes": "7", "order": "2"},
        "a table of which token usually follows the last few, as truedraft train ngram counts it, without FILE the one "
        "counted for the target: a tree of the "
        "likeliest; order reads n-grams of so many tokens at most",
        parts={"table": "truedraft.drafters.specs:ngram_table"},
        widest={"nodes": "15"},
    ),
    "cascade": Kind(
        "truedraft.drafters.specs:cascade",
        None,
        {"num_speculative_tokens": "8"},
        "B drafts so many tokens, and A drafts these for it, as in cascade(prompt-lookup;draft): B has a model that "
        "verifies, draft or self, and A reads only tokens, or is a cascade",
        widest={"num_speculative_tokens": "12"},
        members="A;B",
    ),
}
"""The kinds without trained heads, by name."""
