"""The contract of a drafter, and the one that never drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from truedraft.core.budget import NO_DRAFT, Budget, Hint
from truedraft.core.noise import KeyedNoise, Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.rank_tree import RankTree
from truedraft.core.shaping import Shaping
from truedraft.drafters.held import Held
from truedraft.errors import DrafterError
from truedraft.models.base import LanguageModel
from truedraft.models.cache import RequestCache

if TYPE_CHECKING:
    from truedraft.drafters.heads.base import HeadDrafter


@dataclass(frozen=True, eq=False, slots=True)
class DraftRequest:
    """What a drafter sees of a request; the engine owns and grows it.

    Attributes:
        id: unique in its engine.
        params: sampling options.
        tokens: prompt and answer so far, to be read only; all but the last are in the target's cache.
        prediction: tokens that its answer is expected to repeat in large parts.
        scope: what it has read may be shared with requests of the same scope.
        shaping: what its options do to logits before a distribution is made of them; None where they do nothing. A
            draft that does the same is accepted more often, and is judged as exactly without it.
        inputs: what its prompt has beside its tokens.
        kept: whether a drafter may keep what it wrote for later ones; not of a rehearsal.
        cache: the target's, while the request runs in an engine, for drafts made of the target itself: what they write
            behind its committed tokens they roll back, and they never commit.
        judged: the kinds of draws that its rule judges, or keeps most of, for drafters that can draft in several ways;
            None: all.
    """

    id: int
    params: SamplingParams
    tokens: Sequence[int] = ()
    shaping: Shaping | None = None
    scope: Hashable = None
    prediction: tuple[int, ...] = ()
    inputs: Mapping[str, Tensor] | None = None
    kept: bool = True
    cache: RequestCache | None = None
    judged: frozenset[DrawKind] | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """What a drafter needs to see of the target's forward, beside the tokens: the vectors that enter the LM head.

    Attributes:
        rows: "last" is the row where the next token was drawn, and at a part of a prompt its last; "tree" are all rows
            of a tree, and at a part of a prompt its last; "accepted" are those of tokens that stay: of a tree the last
            token's and the accepted ones', whoever drafted them, and at a part of a prompt its last; "kept" are the
            same and all of a part of a prompt; "all" are all rows that were fed: those of a tree, or of the part of the
            prompt.
        logits: whether the logits of these rows are wanted, too.
        layers: numbers of layers, 0 the first, whose output at these rows is wanted, too.
    """

    rows: Literal["last", "tree", "accepted", "kept", "all"] = "last"
    logits: bool = False
    layers: tuple[int, ...] = ()

    @property
    def of_prompts(self) -> bool:
        """Whether rows of all tokens of a prompt are wanted."""
        return self.rows in ("kept", "all")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of one request in one step.

    Attributes:
        proposal: what was proposed.
        path: accepted nodes of it, from the root's child down, cut where the answer ended.
        tokens: what was emitted.
        hidden: `[rows, width]`: the vectors that entered the LM head, at the rows of `Drafter.features`: one row, or
            row 0 at the last token of the context and row i + 1 at node i, or at the i + 1st accepted token where only
            kept ones were declared, or one for each token of a part of a prompt;
            None where none were declared.
        logits: `[rows, vocab]` of the same rows, where they were declared.
        layers: `[rows, width]` of each declared layer at the same rows.
        partial: whether this was a part of a prompt that is not its last, behind which no token is drawn.
    """

    proposal: Proposal
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    hidden: Tensor | None = None
    logits: Tensor | None = None
    layers: tuple[Tensor, ...] = ()
    partial: bool = False


class CutShortError(DrafterError):
    """A drafter that was asked for one request failed after it had drawn, and what it had drawn by then is judged.

    Whether it fails may depend on what it drew, so that to drop this would bend the distribution of the answer. The
    error's cause says how it failed. One that had drawn nothing, or was asked for several, raises any other error.

    Args:
        proposal: all that was drawn.
    """

    def __init__(self, proposal: Proposal) -> None:
        super().__init__("the drafter failed after it had drawn")
        self.proposal = proposal


class LostDrawsError(DrafterError):
    """A drafter failed after it had drawn, and did not say what: the text before cannot go on as it should."""

    @classmethod
    def raise_if_lost(cls, name: str, error: Exception, params: SamplingParams, noise: Noise) -> None:
        """Raise it, if a drafter that was asked for one request and raised an error had drawn by this noise."""
        drew = isinstance(noise, KeyedNoise) and noise.drew and not params.seeded
        if drew and not isinstance(error, LostDrawsError):
            raise cls(
                f"drafter {name!r} failed after it had drawn, and did not say what ({type(error).__name__}: {error}); "
                "to go on without that would bend the answer; raise CutShortError with what was drawn "
                "(docs/adding_a_drafter.md)"
            ) from error


_NO_HINT = Hint()
_CHOSEN = frozenset({DrawKind.DETERMINISTIC})


class Drafter(ABC):
    """Proposes token trees and observes what became of them.

    A drafter sets `name` and `limits` and implements `propose`; all else has a default. docs/adding_a_drafter.md is the
    guide, with how `noise` is used.

    The engine calls `begin` once for each request, then for each step `propose` with those that are to be drafted for
    and `observe` with all that took part, then `end`. A part of a prompt is a step with an empty proposal, and
    `observe` follows it too.

    What it raises costs no answer: a request that it fails for goes on undrafted. Where it had drawn something, it says
    what by a `CutShortError`; else that request ends with an error, for nobody knows what its text would have become.
    If `propose` fails for several requests together, each is asked for alone, with the same budget and noise, and draws
    the same. If `observe` does, what it noted of them is unknown, so for each of them `end` and `begin` are called, the
    latter with prompt and answer so far in `request.tokens`, and then `observe` with the step's outcome alone. So
    `begin` may come in the middle of an answer, and what was observed before it is gone.

    Attributes:
        name: for reports.
        limits: upper limits on what it proposes; a controller decides within them.
        features: what `observe` must be given of the target's forward; None is the tokens alone.
        observes_lazily: whether `observe` may leave out steps in which it proposed nothing; of several in a row it is
            then called with the last, before the next `propose`.
        model: the model that drafts, of a drafter that has one beside the target.
        held: what it holds for requests; nothing for one that is over.
        trees: what is known of its trees, of a drafter whose trees somebody measured.
        branching: draws at a node of depth 0, 1, ... of its largest proposal; () where that is no fixed number.
        ranks: the draws of sampled requests, the best ones first, of which a budget of n nodes gets the first n; None
            where `branching` says how many there are.
        levels: forwards, one behind another, that the last `propose` took; None where each level of depth takes one.
        walks_along: whether it has `along`, for what it draws from at a place depends on how deep its draft is there.
    """

    name: ClassVar[str]
    limits: Budget
    trees: HeadDrafter[Any, Any] | None = None
    branching: tuple[int, ...] = ()
    ranks: RankTree | None = None
    levels: int | None = None
    walks_along: bool = False
    features: Features | None = None
    observes_lazily: bool = False
    model: LanguageModel | None = None
    held: Held = Held()

    @property
    def warmups(self) -> int:
        """Forwards of its own so far that took longer than others of their shape will; see `LanguageModel`."""
        return 0 if self.model is None else self.model.warmups

    @property
    def members(self) -> Mapping[str, Drafter]:
        """The drafters that a controller chooses among, by name; only a portfolio has others than itself."""
        return {self.name: self}

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """The kinds of draws that it makes for sampled requests; unless it says so none: it chooses candidates."""
        return _CHOSEN

    def kinds_for(self, judged: frozenset[DrawKind]) -> frozenset[DrawKind]:
        """Those that it makes for requests whose rule judges `judged`; others too, where it has no choice."""
        return self.kinds

    def hint(self, request: DraftRequest) -> Hint:
        """What it knows of its next proposal for a request before it makes it; asked at any time, and cheap."""
        return _NO_HINT

    def serves(self, request: DraftRequest) -> bool:
        """Whether it can ever draft for a request; where not, it is never asked."""
        return True

    def check(self, target: LanguageModel) -> None:  # noqa: B027 - most drafters fit every target
        """Refuse a target that it does not fit, before anything runs.

        Raises:
            CompositionError: says why.
        """

    def begin(self, request: DraftRequest) -> None:  # noqa: B027 - optional
        """A request starts; its prompt is in `request.tokens`, and behind it what was already answered, if any."""

    @property
    def report(self) -> Mapping[str, float]:
        """Numbers of its own since it was made, for reports, beside what is counted of every drafter; {}: none."""
        return {}

    @abstractmethod
    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Guess for each request, within its budget; at budget zero no work is done and the proposal is empty.

        Whether a draw exists may depend on tokens already in the proposal, never on the token that it draws
        (docs/concepts.md, predictable choice).

        Distributions that draws name are distributions (finite, not negative, sum 1) and give something to each token
        drawn; other draws are not judged, and their request goes on undrafted. A distribution that no draw names may
        hold anything."""

    def along(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], texts: Sequence[Sequence[int]]
    ) -> Sequence[Tensor]:
        """What it would draw from if its drafts were given texts: for each `[depth, vocab]`, as deep as it would draft.

        In place of `propose`, where a known answer is replayed.
        """
        raise DrafterError(f"drafter {self.name!r} does not say what it draws from along a text")

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:  # noqa: B027 - optional
        """The step is over; `request.tokens` already holds what it emitted.

        A drafter that keeps a cache commits the accepted `path` and drops the rest of what it drafted."""

    def rewind(self, request: DraftRequest) -> None:
        """The text in `request.tokens` lost tokens at its end, as drafted ones are lost in a cascade.

        It is cut, and nothing was added to it yet; what was observed behind is void. Forgets the request and begins
        anew, where a drafter does not know better."""
        self.end(replace(request, kept=False))
        self.begin(request)

    def end(self, request: DraftRequest) -> None:  # noqa: B027 - optional
        """A request is over; give back what was held for it. Also called for requests that failed."""


class NoDrafter(Drafter):
    """Never guesses. The step is then plain decoding, by the same code."""

    name: ClassVar[str] = "none"
    limits: Budget = NO_DRAFT
    observes_lazily = True

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset()

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        return [Proposal.empty() for _ in batch]
