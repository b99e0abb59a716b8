"""The interface of a drafter, the base of those that choose tokens without drawing, and the one that never drafts."""

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
from truedraft.core.tree import TokenTree
from truedraft.drafters.held import Held
from truedraft.errors import DrafterError
from truedraft.models.base import LanguageModel
from truedraft.models.cache import RequestCache

if TYPE_CHECKING:
    from truedraft.drafters.heads.base import HeadDrafter


@dataclass(frozen=True, eq=False, slots=True)
class DraftRequest:
    """A request as a drafter sees it; the engine owns and extends it.

    Attributes:
        tokens: prompt and answer so far, read-only; all but the last are in the target's cache.
        prediction: tokens that the answer is expected to repeat in large parts.
        scope: prefixes may be shared between requests of the same scope.
        shaping: how its options change logits; None if they do not. Ignoring them only lowers acceptance.
        kept: whether a drafter may keep its text for later requests; False for synthetic requests of measurements.
        cache: the target's cache, while the request runs in an engine, for drafts made by the target itself. They roll
            back what they write after its committed tokens, and never commit.
        judged: the kinds of draws that its rule verifies, or keeps most of; None: all.
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
    """What a drafter reads of the target's forward in addition to the tokens: hidden states that enter the LM head.

    Attributes:
        rows: "last": the row from which the next token was drawn. "tree": all rows of a tree. "accepted": the rows of
            the last token and of accepted tokens of any drafter. For a part of a prompt these are its last row. "kept":
            as "accepted", and all rows of a part of a prompt. "all": all rows that were fed.
        layers: layers, from 0, with outputs that are required too.
    """

    rows: Literal["last", "tree", "accepted", "kept", "all"] = "last"
    logits: bool = False
    layers: tuple[int, ...] = ()

    @property
    def of_prompts(self) -> bool:
        return self.rows in ("kept", "all")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step for one request.

    Attributes:
        path: accepted nodes of the proposal, from the root's child down, cut at the end of the answer.
        hidden: `[rows, width]`: inputs of the LM head at the rows of `Drafter.features`: one row; or row 0 at the last
            token of the context and row i + 1 at node i, or for accepted rows at the i + 1st accepted token; or one row
            per token of a part of a prompt. None if none were declared.
        logits, layers: `[rows, vocab]`, and `[rows, width]` of each declared layer, at the same rows.
        partial: whether this was a part of a prompt other than its last, after which no token is drawn.
    """

    proposal: Proposal
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    hidden: Tensor | None = None
    logits: Tensor | None = None
    layers: tuple[Tensor, ...] = ()
    partial: bool = False


class CutShortError(DrafterError):
    """A drafter failed for a single request after it had drawn; what it drew is still verified.

    Whether it fails may depend on what it drew, so dropping the draws would bias the answer. A drafter that drew
    nothing, or was called for several requests, raises any other error.
    """

    def __init__(self, proposal: Proposal) -> None:
        super().__init__("the drafter failed after it had drawn")
        self.proposal = proposal


class LostDrawsError(DrafterError):
    """A drafter failed after it had drawn, and did not report its draws: the text cannot continue without bias."""

    @classmethod
    def raise_if_lost(cls, name: str, error: Exception, params: SamplingParams, noise: Noise) -> None:
        """Raise it if a drafter that failed for a single request had drawn by this noise."""
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
    """Proposes token trees and observes which of their nodes are accepted.

    A drafter sets `name` and `limits` and implements `propose`; all else has a default. docs/adding_a_drafter.md is the
    guide, and explains how to use `noise`.

    The engine calls `begin` once per request; then in each step `propose` with the requests to draft for, and `observe`
    with all requests of the step; then `end`. A part of a prompt is a step with an empty proposal, and `observe`
    follows it too.

    After an exception the request continues without a draft. If the drafter had already drawn, it must raise a
    `CutShortError` with its draws; otherwise the request ends with an error, because its answer would be biased. If
    `propose` fails for several requests together, it is called for each one separately, with the same budget and noise.
    If `observe` fails, `end` and `begin` are called for each of these requests, and then `observe` with the step's
    outcome. So `begin` may come in the middle of an answer, and earlier observations are lost.

    Attributes:
        limits: upper limits of its proposals; a controller decides within them.
        features: what `observe` reads of the target's forward; None is the tokens only.
        observes_lazily: whether `observe` may skip steps in which it proposed nothing; of several in a row it then gets
            the last, before the next `propose`.
        held: memory held for requests; nothing for ended ones.
        branching: draws at a node of depth 0, 1, ... of its largest proposal; () if this number is not fixed.
        ranks: the draws of sampled requests, the best ones first; a budget of n nodes gets the first n. None if
            `branching` gives their number.
        levels: number of sequential forwards in the last `propose`; None if each level of depth takes one.
        walks_along: whether it implements `along`, because its distribution at a position depends on the draft's depth.
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
        """Number of its own forwards so far that were slower than later ones of the same shape."""
        return 0 if self.model is None else self.model.warmups

    @property
    def members(self) -> Mapping[str, Drafter]:
        """The drafters that a controller chooses among, by name; only a portfolio has others than itself."""
        return {self.name: self}

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """The kinds of draws in proposals for sampled requests; by default only deterministic candidates."""
        return _CHOSEN

    def kinds_for(self, judged: frozenset[DrawKind]) -> frozenset[DrawKind]:
        """The kinds that it makes for requests with a rule that verifies `judged`; others too if it has no choice."""
        return self.kinds

    def hint(self, request: DraftRequest) -> Hint:
        """A prediction about its next proposal for a request; may be called at any time, and must be fast."""
        return _NO_HINT

    def serves(self, request: DraftRequest) -> bool:
        """Whether it can ever draft for a request; if not, it is never called for it."""
        return True

    def check(self, target: LanguageModel) -> None:  # noqa: B027 - most drafters fit every target
        """Refuse an incompatible target with a `CompositionError`, before anything runs."""

    def begin(self, request: DraftRequest) -> None:  # noqa: B027 - optional
        """A request starts; `request.tokens` has its prompt, followed by the answer so far, if any."""

    @property
    def report(self) -> Mapping[str, float]:
        """Its own statistics since it was made, for reports, in addition to those of every drafter; {}: none."""
        return {}

    @abstractmethod
    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Draft for each request, within its budget; at budget zero the proposal is empty and no work is done.

        Whether a draw exists may depend on earlier tokens of the proposal, never on its own (docs/concepts.md,
        predictable choice). Distributions of draws must be finite, not negative, of sum 1, and positive at each drawn
        token; other draws are not verified.
        """

    def along(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], texts: Sequence[Sequence[int]]
    ) -> Sequence[Tensor]:
        """Its distributions `[depth, vocab]` if its drafts were the given texts; replaces `propose` in replays."""
        raise DrafterError(f"drafter {self.name!r} does not say what it draws from along a text")

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:  # noqa: B027 - optional
        """The step is over; `request.tokens` has its tokens. Caches commit the accepted `path` and drop the rest."""

    def rewind(self, request: DraftRequest) -> None:
        """`request.tokens` lost tokens at its end, as in a cascade; observations after the cut are void."""
        self.end(replace(request, kept=False))
        self.begin(request)

    def end(self, request: DraftRequest) -> None:  # noqa: B027 - optional
        """A request is over; release what it holds. Also called for failed requests."""


class NoDrafter(Drafter):
    """Never drafts. The step is then plain decoding, in the same code."""

    name = "none"
    limits: Budget = NO_DRAFT
    observes_lazily = True
    kinds: frozenset[DrawKind] = frozenset()

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        return [Proposal.empty() for _ in batch]


class CandidateDrafter(Drafter):
    """Proposes trees of deterministic candidates, which every rule verifies exactly at every temperature."""

    observes_lazily = True

    @abstractmethod
    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        """The tree of a request, which may be empty; `budget` is not zero, and within the drafter's limits."""

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = []
        for request, budget in zip(batch, budgets, strict=True):
            tree = TokenTree.empty() if budget.is_zero else self.candidates(request, budget.within(self.limits))
            proposals.append(Proposal.deterministic(tree) if len(tree) else Proposal.empty())
        return proposals
