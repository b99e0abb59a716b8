"""Changes of logits by a request's options before the distribution is computed: bans, biases and penalties.

At a node of a token tree the text is the committed text and the node's own path, so a tree is verified with exactly the
distributions of plain decoding. In order: allowed_token_ids, bad_words, min_tokens, the form of a structured answer,
logit_bias, then the repetition, frequency and presence penalties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.params import SamplingParams
from truedraft.core.probs import most_likely
from truedraft.core.tree import TokenTree

_SIGN, _INFINITY = -(2**31), 0x7F800000  # bits of a float32
Path: TypeAlias = Sequence[int]
"""Tokens after the committed text."""


class Form(Protocol):
    """The state of one request's answer in its structured form; its owner appends the tokens."""

    def masks(self, paths: Sequence[Path]) -> NDArray[np.bool_]:
        """Which tokens may follow some paths, `[paths, vocab]`; all of them after a path that leaves the form."""
        ...

    def allows(self, path: Path, token: int) -> bool:
        """Whether a token may follow a path, as in `masks`, possibly without computing a mask."""
        ...

    def legal(self, path: Path) -> int:
        """How many tokens of a path, from its first, are in the form."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens of the text that the form determines next; other tokens may write the same text."""
        ...

    def recalls(self) -> bool:
        """Whether the first of these is the token with which the answer began the same text before."""
        ...

    def problem(self) -> str:
        """Why the form allows no token next; "" where it allows some."""
        ...


class Shaping:
    """Changes logits by one request's options.

    Args:
        tokens: prompt and answer so far; the owner appends to it.
        prompt_tokens: length of the prompt.
        ends: ids that end the answer.
        bad_words: token ids of each forbidden text.
        vocab_size: of the target; logits of further ids of a draft are not changed.
        first: tokens before this one are an encoder's text, which the decoder does not see.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_tokens: int,
        ends: Collection[int],
        bad_words: Collection[tuple[int, ...]],
        vocab_size: int,
        form: Form | None = None,
        first: int = 0,
    ) -> None:
        self.form = form
        self._first = first
        self._params = params
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._ends = sorted(ends) if params.min_tokens else []
        self._vocab = vocab_size
        self._never = sorted(word[0] for word in bad_words if len(word) == 1)
        self._words = [word for word in bad_words if len(word) > 1]
        self._repetition = params.repetition_penalty
        banned = bool(bad_words or params.allowed_token_ids or self._ends)
        penalised = params.presence_penalty or params.frequency_penalty or self._repetition != 1.0
        self._changes = bool(banned or params.logit_bias or penalised)
        self._subtracts = bool(params.presence_penalty or params.frequency_penalty)
        self._counts: dict[int, int] = {}  # of the answer's tokens
        self._counted = prompt_tokens  # tokens counted so far
        self._tables: dict[tuple[torch.device, torch.dtype], _Tables] = {}

    @property
    def reads_paths(self) -> bool:
        return bool(self.form is not None or self._words or self._subtracts or self._repetition != 1.0)

    def of_paths(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Logits `[paths, vocab]` after some paths, as a copy in float32, or float64 where they are."""
        wide = _wide(logits)
        self._change(wide, [len(path) for path in paths], paths)
        if self.form is not None:
            _forbid(wide, self.form.masks(paths))
        return wide

    def _change(self, wide: Tensor, depths: Sequence[int], paths: Sequence[Path]) -> None:
        """Apply all options except the form, in place; the order does not matter for tokens that the form forbids."""
        if not self._changes:
            return
        self._count()
        rows = wide[:, : self._vocab]
        tables = self._tables_for(rows)
        if tables.banned is not None:
            rows.masked_fill_(tables.banned, -math.inf)
        self._ban_words(rows, paths)
        answered = len(self._tokens) - self._prompt_tokens
        early = [row for row, depth in enumerate(depths) if answered + depth < self._params.min_tokens]
        if early and self._ends:
            at, ends = (transfers.upload(each, rows.device) for each in (early, self._ends))
            rows[at[:, None], ends] = -math.inf
        if tables.bias is not None:
            rows.add_(tables.bias)
        if self._subtracts or self._repetition != 1.0:
            self._penalise(rows, paths, tables)

    def _ban_words(self, rows: Tensor, paths: Sequence[Path]) -> None:
        longest = max(map(len, self._words), default=0) - 1
        banned: list[tuple[int, int]] = []
        for row, path in enumerate(paths if self._words else ()):
            tail = (*self._tokens[max(self._first, len(self._tokens) - longest) :], *path)[-longest:]
            banned += [(row, word[-1]) for word in self._words if tail[1 - len(word) :] == word[:-1]]
        if banned:
            at, ids = transfers.upload(np.array(banned).T.copy(), rows.device)
            rows[at, ids] = -math.inf

    def _penalise(self, rows: Tensor, paths: Sequence[Path], tables: _Tables) -> None:
        """Apply the penalties of the committed text to all rows, and to each those of its own path.

        Worked example: with a frequency penalty of 1 and an answer "a b", the row after the path "a" loses 2 at a and 1
        at b.
        """
        own = [(row, token, path.count(token)) for row, path in enumerate(paths) for token in dict.fromkeys(path)]
        if own:
            at, ids = transfers.upload(np.array([(row, token) for row, token, _ in own]).T.copy(), rows.device)
            ids = ids.clamp(0, self._vocab - 1)  # ids that do not exist are reported later
            lost = [self._lost(self._counts.get(token, 0) + count) for _, token, count in own]
            fixed = self._repeated(rows[at, ids]) - transfers.upload(lost, rows.device, rows.dtype)
        if tables.seen is not None:
            rows.copy_(torch.where(tables.seen, self._repeated(rows), rows))
        if tables.lost is not None:
            rows.sub_(tables.lost)
        if own:
            rows[at, ids] = fixed

    def _repeated(self, logits: Tensor) -> Tensor:
        if self._repetition == 1.0:
            return logits
        return torch.where(logits > 0.0, logits / self._repetition, logits * self._repetition)

    def _lost(self, count: int) -> float:
        return self._params.presence_penalty + self._params.frequency_penalty * count

    def _count(self) -> None:
        new = self._tokens[self._counted :]
        if not new:
            return
        self._counted = len(self._tokens)
        for token in new:
            self._counts[token] = self._counts.get(token, 0) + 1
        for tables in self._tables.values():
            tables.take(dict.fromkeys(new), lambda token: self._lost(self._counts[token]))

    def _tables_for(self, rows: Tensor) -> _Tables:
        key = rows.device, rows.dtype
        if key not in self._tables:
            params, vocab = self._params, self._vocab
            tables = self._tables[key] = _Tables()
            if params.allowed_token_ids or self._never:
                tables.banned = torch.zeros(vocab, dtype=torch.bool, device=rows.device)
                if params.allowed_token_ids:
                    tables.banned.logical_not_()
                    tables.banned[transfers.upload(list(params.allowed_token_ids), rows.device)] = False
                if self._never:
                    tables.banned[transfers.upload(self._never, rows.device)] = True
            if params.logit_bias:
                ids, values = zip(*params.logit_bias, strict=True)
                tables.bias = torch.zeros(vocab, device=rows.device, dtype=rows.dtype)
                tables.bias[transfers.upload(list(ids), rows.device)] = transfers.upload(
                    list(values), rows.device, rows.dtype
                )
            if self._subtracts:
                tables.lost = torch.zeros(vocab, device=rows.device, dtype=rows.dtype)
            if self._repetition != 1.0:
                tables.seen = torch.zeros(vocab, device=rows.device, dtype=torch.bool)
                tables.seen[transfers.upload(sorted(set(self._tokens[self._first :])), rows.device)] = True
            tables.take(self._counts, lambda token: self._lost(self._counts[token]))
        return self._tables[key]


def shaped_trees(
    logits: Tensor, trees: Sequence[TokenTree], shapings: Sequence[Shaping | None], argmax: Sequence[bool]
) -> Tensor:
    """Logits at the rows of the token trees of several requests, changed by the options of each.

    Args:
        logits: `[rows, vocab]`, of the trees in order: row 0 after the committed text, row i + 1 after node i.
        trees: their tokens are read where necessary, which waits for the device.
        shapings: one per tree; None changes nothing.
        argmax: one per tree, whether only the likeliest token of a row matters, which saves its mask.

    Returns:
        `[rows, vocab]`, float32, or float64 where the logits are, as a copy; the given tensor if nothing changes.
    """
    changes = any(shaping is not None and shaping._changes for shaping in shapings)
    wide = _wide(logits) if changes else logits
    formed: list[tuple[Form, Sequence[Path], int, bool]] = []  # with the first row, and whether its argmax suffices
    first = 0
    for tree, shaping, greedy in zip(trees, shapings, argmax, strict=True):
        end = first + len(tree) + 1
        if shaping is not None:
            paths: Sequence[Path] = [(), *map(tree.path_tokens, range(len(tree)))] if shaping.reads_paths else ()
            shaping._change(wide[first:end], (0, *tree.shape.depths), paths)
            if shaping.form is not None:
                formed.append((shaping.form, paths, first, greedy))
        first = end
    likeliest = most_likely(wide).tolist() if any(greedy for *_, greedy in formed) else []
    places: list[int] = []  # of rows that masks are needed for
    masks: list[NDArray[np.bool_]] = []
    for form, paths, first, greedy in formed:
        left = [row for row, path in enumerate(paths) if not (greedy and form.allows(path, likeliest[first + row]))]
        places += [first + row for row in left]
        masks += [form.masks([paths[row] for row in left])] if left else []
    if masks:  # one pass over all rows
        wide = wide if changes else _wide(logits)
        rows = wide[places]
        _forbid(rows, np.concatenate(masks))
        wide[places] = rows
    return wide


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)


def _forbid(wide: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Set logits not allowed by masks `[rows, ids]` to -inf, in place."""
    # The minimum with plus or minus infinity (the sign bit): masked operations take twice as long on the CPU.
    known = torch.from_numpy(allowed).to(wide.device, torch.int32)
    bounds = known.sub_(1).bitwise_and_(_SIGN).bitwise_or_(_INFINITY).view(torch.float32).to(wide.dtype)
    rows = wide[:, : allowed.shape[1]]
    torch.minimum(rows, bounds, out=rows)


class _Tables:
    """The changes that depend only on committed text and options, `[vocab]` each; None where there are none.

    `banned` is bool, `bias` is added, `lost` is subtracted, and `seen` (bool) is whether prompt or answer contain it.
    """

    def __init__(self) -> None:
        self.banned: Tensor | None = None
        self.bias: Tensor | None = None
        self.lost: Tensor | None = None
        self.seen: Tensor | None = None

    def take(self, tokens: Collection[int], lost: Callable[[int], float]) -> None:
        if not tokens:
            return
        if self.lost is not None:
            ids = transfers.upload(list(tokens), self.lost.device)
            self.lost[ids] = transfers.upload(list(map(lost, tokens)), self.lost.device, self.lost.dtype)
        if self.seen is not None:
            self.seen[transfers.upload(list(tokens), self.seen.device)] = True
