"""Common mistakes with drafters, as data: for each kind the variants that the doctor tries, each with its fix.

A variant is made from the given case: other weights, sizes or dtypes, other hidden states of the target, or prompts
written in another way. One that a case does not allow raises an error of this package, and is reported as not tried.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from truedraft.core.top_k import TopK
from truedraft.drafters.base import Drafter, StepOutcome
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.heads.head import Head
from truedraft.drafters.heads.layers import LayerConfig
from truedraft.drafters.kinds import KINDS, dotted, kind_in
from truedraft.engine.prompts import encode_prompt
from truedraft.errors import CompositionError, ModelError, ModelNotFoundError, OptionError
from truedraft.files import object_of, user_path
from truedraft.measure.traces import AnswerTrace, trace_after, trace_answers
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import EMBEDDED, embedded_folder, embedded_heads
from truedraft.models.loading import load_model
from truedraft.models.translated import TranslatedModel

CONFIG = "config.json"
_USUAL_THETA = 10_000.0  # default of config.json
_DRAFT_WORD = "draft"
_DRAFTED = 4  # tokens of a draft model's chain


@dataclass(frozen=True)
class Source:
    """Where a drafter is stored, and changes to a draft model's files."""

    path: Path
    without: str = ""  # pattern of names of files to leave out
    files: Mapping[str, Any] = field(default_factory=dict)  # JSON objects by the names of the files that they replace
    dtype: torch.dtype | None = None  # of the model; None is the target's

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.files.get(CONFIG) or object_of(self.path / CONFIG))

    def draft(self, target: LanguageModel) -> LanguageModel:
        """The draft model, with its ids translated to the target's where its tokenizer is another.

        Raises OptionError if its files are to be read otherwise and lie in no folder, ModelError if they do not load.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) if self.without or self.files else self.path
            if path is not self.path and not self.path.is_dir():
                raise OptionError("it is no folder of this machine")
            for file in self.path.resolve().iterdir() if path is not self.path else ():
                if file.name not in self.files and not (self.without and re.search(self.without, file.name)):
                    (path / file.name).symlink_to(file)
            for name, content in self.files.items():
                (path / name).write_text(json.dumps(content), encoding="utf-8")
            dtype = self.dtype or target.dtype
            model = load_model(path, dtype=dtype, device=target.device, fast_paths=self.dtype is None)
        ours, theirs = model.tokenizer, target.tokenizer
        same = ours is None or theirs is None or ours.same_vocabulary(theirs)
        return model if same else TranslatedModel(model, target)


@dataclass(frozen=True)
class Case:
    """A drafter with answers of its target."""

    source: Source
    target: LanguageModel
    part: Any
    chain: Callable[[Any], Drafter]
    prompts: tuple[str | tuple[int, ...], ...] = ()
    traces: tuple[AnswerTrace, ...] = ()
    layers: tuple[int, ...] = ()  # the target's layers with hidden states in the traces
    mended: tuple[Variant, ...] = ()  # variants that were needed to load it
    shown: tuple[Callable[[StepOutcome], StepOutcome], ...] = ()  # changes to outcomes before the drafter gets them
    wide: bool = False  # whether the drafter computes in float32 regardless of the target's dtype

    def of(self, part: Any) -> Case:
        return replace(self, part=part)

    def showing(self, change: Callable[[StepOutcome], StepOutcome]) -> Case:
        return replace(self, shown=(*self.shown, change))

    @property
    def read_target(self) -> LanguageModel:
        return cast(LanguageModel, Wide(self.target)) if self.wide else self.target

    def seen(self) -> tuple[AnswerTrace, ...]:
        traces = self.traces
        for change in self.shown:
            traces = tuple(replace(each, seen=tuple(map(change, each.seen))) for each in traces)
        return traces


class Pair(NamedTuple):
    """Two cases to compare on the same tokens; `better` is the one to continue with if the variant is better."""

    given: Case
    changed: Case
    better: Case


def instead(given: Case, changed: Case) -> Pair:
    """The pair where the variant itself is the case to continue with."""
    return Pair(given, changed, changed)


@dataclass(frozen=True)
class Variant:
    """Another way to read a drafter: what is wrong if it is better, and the fix by the better case."""

    name: str
    meaning: str
    fix: Callable[[Case], str]
    make: Callable[[Case], Pair]


class Wide:
    """A target for a head that computes in float32; the target's own weights stay unchanged."""

    dtype = torch.float32

    def __init__(self, target: LanguageModel) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def unembed(self, vectors: Tensor) -> Tensor:
        return self._target.unembed(vectors.to(self._target.dtype)).float()

    def likeliest(self, vectors: Tensor, count: int) -> TopK:
        return TopK.of(self.unembed(vectors), count)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens).float()

    def shared_heads(self, blocks: Any) -> None: ...


def after_prompt(case: Case, prompt: tuple[int, ...], trace: AnswerTrace) -> AnswerTrace:
    """An answer after another prompt, with the features that the target shows there."""
    return trace_after(case.target, prompt, trace, case.chain(case.part).features, case.layers)


@dataclass(frozen=True)
class Examined:
    """A kind of drafter that the doctor examines."""

    noun: str
    chain: Callable[[Any], Drafter]  # of a head or draft model one deterministic chain, as long as it was made for
    own: Sequence[Variant]  # variants that are tried before those of how prompts are written
    head: type[Head] | None = None

    @property
    def variants(self) -> Sequence[Variant]:
        return (*self.own, *_FORMS)

    def load(self, path: Path, target: LanguageModel) -> tuple[Any, tuple[Variant, ...]]:
        """The head or draft model at a path, and the variants needed to load it; TruedraftError if none do."""
        if self.head is None:
            return Source(path).draft(target), ()
        mended: tuple[Variant, ...] = ()
        try:
            head: Any = self.head.load(path)
        except ModelError as error:
            try:  # a published folder with a table that cannot hold offsets
                head, mended = self.head.load_published(path, ids_in_d2t=True), (_IDS,)
            except ModelError:
                raise error from None
            if head is None:
                raise
        return head.reading(target.shown_layers), mended


def changed(
    head: Any, sizes: Mapping[str, Any], without: str = "$.", weights: Mapping[str, Tensor] | None = None
) -> Any:
    """A head with other sizes, without the weights that match a pattern, and with others added or replaced.

    Raises ModelError if these weights make no such head, OptionError if these sizes make none.
    """
    kept = {name: each for name, each in head.state_dict().items() if not re.search(without, name)}
    config = replace(head.config, **dict(sizes))
    return type(head).with_weights(config, kept | dict(weights or {}), Path(CONFIG)).with_record(head.record)


def another_head(change: Callable[[Any], Any]) -> Callable[[Case], Pair]:
    """Makes a variant with another head."""
    return lambda case: instead(case, case.of(change(case.part)))


def flipped(name: str) -> Callable[[Case], Pair]:
    """Makes a variant with the opposite value of a flag."""
    return another_head(lambda head: changed(head, {name: not getattr(head.config, name)}))


def resized(without: str, **sizes: Any) -> Callable[[Case], Pair]:
    """Makes a variant with other sizes, without the weights that match a pattern."""

    def change(head: Any) -> Any:
        if all(getattr(head.config, name) == value for name, value in sizes.items()):
            raise OptionError("it is so as it is")
        return changed(head, sizes, without)

    return another_head(change)


def set_to(name: str) -> Callable[[Case], str]:
    """Makes the fix to set a field of config.json to the value of the case."""
    return lambda case: f"set {name} to {json.dumps(getattr(case.part.config, name))} in {CONFIG}"


def _layer_ids(case: Case) -> str:
    layers = list(case.part.config.layers)
    return (
        f"name layers {[number + 1 for number in layers]} in {CONFIG} where they say what enters a layer (as "
        f"speculators does), and {layers} where they say what leaves it (as truedraft, z-lab and DeepSpec do)"
    )


def _at_layers(change: Callable[[Sequence[int], int, LayerConfig], Sequence[int]]) -> Callable[[Case], Pair]:
    def make(case: Case) -> Pair:
        now, most = case.part.config.layers, case.target.shown_layers
        layers = tuple(change(now, most, case.part.config))
        if not layers or layers == now or min(layers) < 0 or max(layers) >= most:
            raise OptionError(f"there are no layers {list(layers)} other than {list(now)}")
        return instead(case, case.of(changed(case.part, {"layers": layers})))

    return make


def _theta_of(target: LanguageModel) -> float | None:
    config = getattr(getattr(target, "module", None), "config", None)
    rope = getattr(config and config.get_text_config(), "rope_parameters", None)
    return rope.get("rope_theta") if isinstance(rope, dict) else None


def _thetas(change: Callable[[Case, float | None], Pair]) -> list[Variant]:
    def at_usual(case: Case) -> Pair:
        return change(case, None if _theta_of(case.target) == _USUAL_THETA else _USUAL_THETA)

    meaning, at = "its rotation has another theta than in training", f"in {CONFIG}"
    return [
        Variant("rope theta of the target", meaning, lambda case: f"set rope_theta to {_theta_of(case.target):g} {at}",
                lambda case: change(case, _theta_of(case.target))),
        Variant("rope theta 10000", meaning, lambda _: f"set rope_theta to 10000 {at}", at_usual),
    ]  # fmt: skip


def _at_theta(case: Case, theta: float | None) -> Pair:
    rope = case.part.config.rope
    if theta in (None, rope["rope_theta"]):
        raise OptionError("it has this theta")
    return instead(case, case.of(changed(case.part, {"rope": {**rope, "rope_theta": theta}})))


def _ids_moved(sign: int) -> Callable[[Case], Pair]:
    def change(head: Any) -> Any:
        if head.draft_ids is None:
            raise OptionError("it guesses among all ids")
        ids = head.draft_ids + sign * torch.arange(len(head.draft_ids))
        if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size or len(ids.unique()) < len(ids):
            raise OptionError("its table does not name as many ids when it is read so")
        return changed(head, {}, weights={"draft_ids": ids})

    return another_head(change)


def _in_float32(case: Case) -> Pair:
    if case.wide or case.target.dtype is torch.float32:
        raise OptionError("it computes in float32")

    def widened(seen: StepOutcome) -> StepOutcome:
        hidden = None if seen.hidden is None else seen.hidden.float()
        return replace(seen, hidden=hidden, layers=tuple(each.float() for each in seen.layers))

    return instead(case, replace(case.showing(widened), wide=True))


def _before_final_norm(case: Case) -> Pair:
    last = case.target.shown_layers - 1
    if last not in case.layers:
        raise OptionError("the target shows no vector before its final norm")
    place = case.layers.index(last)
    return instead(case, case.showing(lambda seen: replace(seen, hidden=seen.layers[place])))


WIDE = Variant(
    "float32",
    "its numbers are too large or too far apart for the target's dtype",
    lambda _: "run target and head by --dtype float32, or train the head in the dtype that serves",
    _in_float32,
)
RAW = Variant(
    "vector before the final norm",
    "it was trained on what leaves the last layer, and reads what enters the LM head, after the final norm",
    lambda _: "train it on the vectors that enter the LM head, or fold the norm into its first layer",
    _before_final_norm,
)
TIED = "the LM head in its folder is not the one that it was trained with"
_IDS = Variant(
    "d2t as ids",
    "its table d2t holds ids, and readers take it for offsets",
    lambda _: "store d2t[j] - j: the draft's token j is the target's token j + d2t[j]",
    _ids_moved(-1),
)
LAYERS = (
    Variant("layers one earlier", "the layers that it reads are numbered one too high", _layer_ids,
            _at_layers(lambda layers, *_: [each - 1 for each in layers])),
    Variant("layers one later", "the layers that it reads are numbered one too low", _layer_ids,
            _at_layers(lambda layers, *_: [each + 1 for each in layers])),
    Variant("layers reversed", "the layers that it reads are listed the wrong way round", _layer_ids,
            _at_layers(lambda layers, *_: layers[::-1])),
    Variant("usual layers", "it was trained on the usual layers, and others are named", _layer_ids,
            _at_layers(lambda _, count, config: config.usual_of(count))),
    Variant("embedding of the target", "the embedding in its folder is not the one that it was trained with",
            lambda _: "take embed_tokens out of the weights, or put the target's there",
            resized(r"^embed_tokens\.", own_embedding=False)),
    Variant("LM head of the target", TIED, lambda _: "take lm_head out of the weights, or put the target's rows there",
            resized(r"^lm_head\.|^draft_ids$", own_output=False, draft_vocab=0)),
    Variant("d2t as offsets", "its table d2t holds offsets and was read as ids",
            lambda _: "store d2t[j] + j where ids are wanted", _ids_moved(1)),
    _IDS,
    *_thetas(_at_theta),
    WIDE,
)  # fmt: skip


Form: TypeAlias = Callable[[Case, int], Sequence[int]]  # writes the prompt of a trace, given by its number, in one way


def _plain(case: Case, number: int) -> Sequence[int]:
    prompt = case.prompts[number]
    return encode_prompt(case.target, prompt if isinstance(prompt, str) else list(prompt))


def _as_chat(of: Callable[[Case], Any]) -> Form:
    def form(case: Case, number: int) -> Sequence[int]:
        tokenizer, prompt = of(case), case.prompts[number]
        if tokenizer is None or not isinstance(prompt, str):
            raise OptionError("there is no text or no tokenizer to write it by a template")
        return list(tokenizer.chat([{"role": "user", "content": prompt}]))

    return form


def _other_bos(case: Case, number: int) -> Sequence[int]:
    ids = case.traces[number].prompt
    bos = None if case.target.tokenizer is None else case.target.tokenizer.backend.bos_token_id
    if bos is None:
        raise OptionError("no token begins texts")
    return ids[1:] if ids[0] == bos and len(ids) > 1 else (bos, *ids)


def _written(form: Form) -> Callable[[Case], Pair]:
    """A variant with other prompts; both answers are replayed after both prompts, as one may be easier to predict."""

    def make(case: Case) -> Pair:
        prompts = [tuple(form(case, number)) for number in range(len(case.traces))]
        if prompts == [each.prompt for each in case.traces]:
            raise OptionError("prompts would be the same")
        requests = [(each.name, list(ids), each.params) for each, ids in zip(case.traces, prompts, strict=True)]
        others = trace_answers(case.target, requests)
        given = [after_prompt(case, one.prompt, each) for one, each in zip(case.traces, others, strict=True)]
        changed = [after_prompt(case, other.prompt, each) for other, each in zip(others, case.traces, strict=True)]
        own = tuple(after_prompt(case, each.prompt, each) for each in others)
        return Pair(
            replace(case, traces=(*case.traces, *given)),
            replace(case, traces=(*changed, *own)),
            replace(case, traces=own),
        )

    return make


_FORMS = (
    Variant("prompts without chat template", "it was trained on text without the chat template",
            lambda _: "train it on prompts that the target's chat template writes, or do without the template",
            _written(_plain)),
    Variant("prompts by the target's chat template",
            "it was trained on chats, and prompts come without the chat template",
            lambda _: "serve chats: --chat, or /v1/chat/completions",
            _written(_as_chat(lambda case: case.target.tokenizer))),
    Variant("first token (BOS) there or not",
            "it was trained on texts that begin otherwise: with BOS where it is missing, without it where it is there",
            lambda _: "make the tokenizer's add_bos_token what it was in training, or train as prompts are served",
            _written(_other_bos)),
)  # fmt: skip


def _redrafted(case: Case, **changes: Any) -> Pair:
    source = replace(case.source, **changes)
    return instead(case, replace(case, source=source, part=source.draft(case.target)))


def _same_ids(case: Case) -> Pair:
    if case.part.shared_ids is None:
        raise OptionError("it has the target's tokenizer")
    return _redrafted(case, without=r"token|vocab|merges|spiece|tekken")


def _draft_theta(case: Case, theta: float | None) -> Pair:
    config = case.source.config
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", _USUAL_THETA)} | given
    several = any(isinstance(each, dict) for each in given.values())  # of layers of several kinds
    if not config or theta in (None, rope["rope_theta"]) or several:
        raise OptionError("it has this theta, or none")
    parameters = {"rope_type": "default"} | rope | {"rope_theta": theta}
    changed_config = config | {"rope_theta": theta, "rope_parameters": parameters}
    return _redrafted(case, files={**case.source.files, CONFIG: changed_config})


def _wide_draft(case: Case) -> Pair:
    if torch.float32 in (case.target.dtype, case.source.dtype):
        raise OptionError("it computes in float32")
    return _redrafted(case, dtype=torch.float32)


_DRAFT = (
    Variant("ids of the target", "the tokenizer in its folder is not the one that it was trained with",
            lambda _: "copy the target's tokenizer files into its folder", _same_ids),
    Variant("prompts by its own chat template", "it was trained on chats by another template than the target's",
            lambda _: "train it on the target's template, or serve the target with the draft's",
            _written(_as_chat(lambda case: case.part.tokenizer))),
    *_thetas(_draft_theta),
    Variant("float32", "its numbers are too large or too far apart for the target's dtype, or badly quantised",
            lambda _: "load it in float32, or fetch weights in the dtype in which it was published", _wide_draft),
)  # fmt: skip


def examined(word: str) -> Examined | None:
    """The kind that the doctor examines, by its word in `--drafter`; None for a kind that it does not examine."""
    if word == _DRAFT_WORD:
        return Examined("a draft model", lambda model: DraftModel(model, _DRAFTED), _DRAFT)
    kind = KINDS.get(word)
    found: Examined | None = dotted(kind.variants) if kind is not None and kind.variants else None
    return found


def examined_words() -> list[str]:
    """The words of the kinds that are examined, draft models last."""
    return [*(word for word, kind in KINDS.items() if kind.variants), _DRAFT_WORD]


def case_of(typed: str, target: LanguageModel) -> tuple[Examined, Case]:
    """The drafter in a folder or file, with or without the word of its kind before it.

    Raises ModelNotFoundError if there is nothing, ModelError if it cannot be loaded.
    """
    word, path = place_of(typed)
    kind = examined(word or kind_in(path) or _DRAFT_WORD)
    if kind is None:
        raise CompositionError(f"{str(path)!r} holds none of what is examined: {', '.join(examined_words())}")
    part, mended = kind.load(path, target)
    features, most, layers = kind.chain(part).features, target.shown_layers, set[int]()
    if features is not None and most:
        layers = {most - 1} | {layer + by for layer in features.layers for by in (-1, 0, 1)}
        layers |= set(part.config.usual_of(most)) if features.layers else set()
    seen = tuple(sorted(each for each in layers if 0 <= each < most))
    return kind, Case(Source(path), target, part, kind.chain, layers=seen, mended=mended)


def place_of(typed: str) -> tuple[str | None, Path]:
    """The word of a drafter's kind, if given, and its path; a shipped one is `embedded:NAME`.

    Raises OptionError for a kind without a path, or one that has no weights.
    """
    word, _, rest = typed.partition(":")
    if rest and examined(word) is not None:
        return word, place_of(rest)[1]
    if word == "embedded":
        return None, embedded_folder(rest) if rest in EMBEDDED else embedded_heads(rest)
    path = user_path(typed, ModelNotFoundError)
    if word in KINDS and not path.exists():
        raise OptionError(
            f"{typed!r} says no folder; heads and draft models are examined: name theirs", field="drafter"
        )
    return None, path.absolute() if typed.startswith(".") or path.exists() else path  # or a name on the hub
