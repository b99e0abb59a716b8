"""Lookahead decoding: the target's own Jacobi iterations generate n-grams, which later steps propose."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.core import transfers
from truedraft.core.budget import MOST_NODES, Budget, Hint
from truedraft.core.probs import most_likely
from truedraft.core.tree import TokenTree, merged_paths
from truedraft.drafters.base import CandidateDrafter, DraftRequest, Features, StepOutcome
from truedraft.drafters.held import Held
from truedraft.errors import OptionError

MOST_KEYS = 1024
"""Maximum number of first tokens in a request's pool."""
_KEY_BYTES, _NGRAM_BYTES, _TOKEN_BYTES = 384, 64, 40  # at most, of a pool's Python objects
_FOUND = tuple(Hint(kind) for kind in range(1, 34))


class NgramPool:
    """The latest `most` n-grams for each first token, of which there is a limited number too."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rests: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()  # by first token, in order of use

    def __len__(self) -> int:
        return sum(map(len, self._rests.values()))

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        own = self._rests.setdefault(first, [])
        if rest in own:
            own.remove(rest)
        own.append(rest)
        del own[: -self._most]
        self._rests.move_to_end(first)
        if len(self._rests) > MOST_KEYS:
            self._rests.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        return self._rests.get(token, [])[::-1]


class JacobiWindow:
    """Guesses of the next tokens from several iterations; each forward adds one more iteration (2402.02057, section 3).

    Level 0 is the oldest iteration, a chain after the text's last token. The window's columns start at that token and
    at each token of the chain. Each further level has one token per column, guessed one iteration later. So a column is
    a diagonal trajectory, and the target's prediction after it is its next token. The token before the column, the
    column's tokens and this prediction form an n-gram.

    Worked example, three columns of n-grams of 3: after the text ... r, with level 0 = (a, b) and level 1 = (p, q, s),
    the paths are p, a q and a b s. If the target predicts x, y and z after them, the n-grams are r p x, a q y and b s
    z, and the window becomes level 0 = (q, s) and level 1 = (x, y, z).
    """

    def __init__(self, columns: int, ngram: int, text: Sequence[int]) -> None:
        self._levels = ngram - 1
        length = chain_length(columns, ngram)  # one token shorter with each further level
        chain = itertools.islice(itertools.cycle(text[-length:] if length else ()), length)
        self._guesses: list[list[int]] = [list(chain)]

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The tokens after the text's last one up to the end of each column."""
        chain, further = self._guesses[0], self._guesses[1:]
        return [(*chain[:column], *(level[column] for level in further)) for column in range(len(chain) + 1)]

    def advance(self, root: int, following: Sequence[int]) -> list[tuple[int, ...]]:
        """Add one iteration from the target's predictions after the columns; returns the n-grams of a full window.

        `root` is the token before column 0. The window moves by one position, however many tokens were accepted:
        misplaced columns are soon corrected, and new columns would have to be invented. Moving by the number of
        accepted tokens had a lower measured gain.
        """
        chain, further = self._guesses[0], self._guesses[1:]
        if len(self._guesses) < self._levels:
            self._guesses = [level[1:] for level in (*self._guesses, list(following))]
            return []
        self._guesses = [*further, list(following)]
        self._guesses[0] = self._guesses[0][1:]
        return list(zip((root, *chain), *further, following, strict=True))


def chain_length(columns: int, ngram: int) -> int:
    """Tokens of a window's first chain, which is its longest path."""
    return columns + ngram - 3 if columns else 0


def window_nodes(columns: int, ngram: int) -> int:
    """Maximum number of nodes of a window: each further level has one column less, until it is full."""
    if not columns:
        return 0
    return max((columns + ngram - 1 - levels) * levels - 1 for levels in range(1, ngram))


@dataclass(slots=True)
class _State:
    """The number of tokens with n-grams in the pool, and the nodes at which its window's columns end."""

    pool: NgramPool
    window: JacobiWindow | None = None
    known: int = 0
    ends: tuple[int, ...] | None = None
    root: int = 0
    nodes: int = 0


class Lookahead(CandidateDrafter):
    """Lookahead decoding (Fu et al. 2402.02057): no training and no second model, but more rows in each forward.

    A proposal is a tree of the latest n-grams that begin with the text's last token, and of a window in which the
    target guesses ahead by Jacobi iteration, by argmax at any temperature. The predictions after its columns, and the
    text, make new n-grams. Columns are paths of the token tree, so its tokens are candidates at no extra cost. The
    window is included only if all of it fits the budget. On a device the host waits once more per step. Raises
    `OptionError` for an option out of range.

    Args:
        window: number of columns; with 0 the pool has only n-grams of the text.
        ngram: tokens of an n-gram, of which all but the first are proposed.
        candidates: maximum number of proposed n-grams, and of kept ones per first token.
    """

    name = "lookahead"
    features: Features | None = Features("tree", logits=True)

    def __init__(self, window: int = 2, ngram: int = 5, candidates: int = 2) -> None:
        for option, value, least in (("window", window, 0), ("ngram", ngram, 2), ("candidates", candidates, 1)):
            if not least <= value <= MOST_NODES:
                raise OptionError(f"{option} must be {least} or more and at most {MOST_NODES}, got {value}")
        rest = ngram - 1
        nodes = window_nodes(window, ngram) + candidates * rest
        if nodes > MOST_NODES:
            raise OptionError(
                f"a window of {window} and {candidates} candidates, of n-grams of {ngram}, are {nodes} nodes, and at "
                f"most {MOST_NODES} go; take fewer or shorter ones"
            )
        # A window's nodes have at most two children, the chain's next token and a column's first.
        self.limits = Budget(max(chain_length(window, ngram), rest), candidates + 2 * (window > 0), nodes)
        request_bytes = MOST_KEYS * (_KEY_BYTES + candidates * (_NGRAM_BYTES + _TOKEN_BYTES * rest))
        self._columns = window
        self._ngram = ngram
        self._candidates = candidates
        self._states: dict[int, _State] = {}
        self.held = Held(noted=[self._states], request_bytes=request_bytes)

    def begin(self, request: DraftRequest) -> None:
        self._states[request.id] = _State(NgramPool(self._candidates))

    def end(self, request: DraftRequest) -> None:
        self._states.pop(request.id, None)

    def hint(self, request: DraftRequest) -> Hint:
        return _FOUND[min(len(self._found(request)), len(_FOUND) - 1)]

    def candidates(self, request: DraftRequest, budget: Budget) -> TokenTree:
        state = self._states[request.id]
        state.ends = None
        paths = [rest[: budget.depth] for rest in self._found(request)[: budget.width]]
        tree = TokenTree.from_paths(paths).first(budget.nodes)
        if self._columns:
            if state.window is None:
                state.window = JacobiWindow(self._columns, self._ngram, request.tokens)
            whole, ends = merged_paths([*paths, *state.window.paths])
            shape = whole.shape
            narrow = max(map(len, shape.children)) <= budget.width
            if narrow and len(shape) <= budget.nodes and shape.depth <= budget.depth:
                tree, state.ends = whole, ends[len(paths) :]
                state.root, state.nodes = request.tokens[-1], len(tree)
        return tree

    def _found(self, request: DraftRequest) -> list[tuple[int, ...]]:
        state, tokens, length = self._states[request.id], request.tokens, self._ngram
        if state.known != len(tokens):
            first = max(state.known - length + 1, 0)
            text = tokens[first:]
            for start in range(len(text) - length + 1):
                state.pool.add(text[start : start + length])
            state.known = len(tokens)
        return state.pool.after(tokens[-1])

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        states = []
        following = []
        for request, outcome in zip(batch, outcomes, strict=True):
            state = self._states[request.id]
            ends, logits = state.ends, outcome.logits
            state.ends = None
            # There are no rows in a measurement, or if the proposal was withdrawn.
            if ends is not None and logits is not None and len(logits) == state.nodes + 1:
                states.append(state)
                rows = transfers.upload([node + 1 for node in ends], logits.device)
                following.append(most_likely(logits.index_select(0, rows)))
        if not states:
            return
        for state, tokens in zip(states, transfers.fetch(following), strict=True):
            assert state.window is not None
            for ngram in state.window.advance(state.root, [int(token) for token in tokens]):
                state.pool.add(ngram)
