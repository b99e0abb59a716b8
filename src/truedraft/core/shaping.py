"""What a request's options do to logits before a distribution is made of them: bans, biases and penalties.

All of it is a function of the text that a row of logits continues. At a node of a token tree that is the committed text
and the tokens on the node's own path, so a tree is judged by the very distributions that plain decoding would have
come to: the same operations on the same numbers give the same bits.

In order: allowed_token_ids, bad_words, min_tokens, the form of a structured answer, logit_bias, then the repetition,
frequency and presence penalties.
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
"""Tokens behind the committed text."""


class Form(Protocol):
    """How far the answer of one request, whose tokens somebody else grows, has come in the form that it must have."""

    def masks(self, paths: Sequence[Path]) -> NDArray[np.bool_]:
        """Which tokens may follow behind some paths `[paths, vocab]`; all behind one that leaves the form."""
        ...

    def allows(self, path: Path, token: int) -> bool:
        """Whether a token may follow behind a path: what `masks` says of it; a mask need not be made."""
        ...

    def legal(self, path: Path) -> int:
        """How many tokens of a path, from its first, are in the form."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that write what the form leaves no choice about next; other tokens may write the same text."""
        ...

    def recalls(self) -> bool:
        """Whether the first of these is how the answer began the same text before."""
        ...

    def problem(self) -> str:
        """Why the form can be followed no further, where it allows no token next; "" where it can."""
        ...


class Shaping:
    """What one request's options do to logits.

    Args:
        params: its options.
        tokens: prompt and answer so far, which somebody else owns and grows.
        prompt_tokens: how many of these, the first, are the prompt.
        ends: ids that end the answer.
        bad_words: token ids of each text that must not be.
        vocab_size: of the target; a draft may know more ids, whose logits stay as they are.
        form: of a structured answer.
        first: tokens before this one are an encoder's text, which is none of the decoder's.

    Attributes:
        form: as given.
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
        self._counted = prompt_tokens  # so many of `tokens` were looked at
        self._tables: dict[tuple[torch.device, torch.dtype], _Tables] = {}

    @property
    def reads_paths(self) -> bool:
        """Whether it looks at which tokens are on a path, and not only at how many."""
        return bool(self.form is not None or self._words or self._subtracts or self._repetition != 1.0)

    def of_paths(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Logits behind some paths.

        Args:
            logits: `[paths, vocab]`.
            paths: one for each row.

        Returns:
            `[paths, vocab]`, float32, or float64 where the logits are; the given ones stay as they are.
        """
        wide = _wide(logits)
        self._change(wide, [len(path) for path in paths], paths)
        if self.form is not None:
            _forbid(wide, self.form.masks(paths))
        return wide

    def _change(self, wide: Tensor, depths: Sequence[int], paths: Sequence[Path]) -> None:
        """Do all that options ask for in place, but for the form: what that forbids stays forbidden by any order."""
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
        """No last token of a bad word where the others stand right before it."""
        longest = max(map(len, self._words), default=0) - 1
        banned: list[tuple[int, int]] = []
        for row, path in enumerate(paths if self._words else ()):
            tail = (*self._tokens[max(self._first, len(self._tokens) - longest) :], *path)[-longest:]
            banned += [(row, word[-1]) for word in self._words if tail[1 - len(word) :] == word[:-1]]
        if banned:
            at, ids = transfers.upload([each for pair in zip(*banned, strict=True) for each in pair], rows.device).view(
                2, -1
            )
            rows[at, ids] = -math.inf

    def _penalise(self, rows: Tensor, paths: Sequence[Path], tables: _Tables) -> None:
        """Penalties for the committed text in all rows, and in each what its own path adds to that.

        Worked example: with a frequency penalty of 1 and an answer "a b", the row behind the path "a" loses 2 at a and
        1 at b.
        """
        own = [(row, token, path.count(token)) for row, path in enumerate(paths) for token in dict.fromkeys(path)]
        if own:
            at, ids = transfers.upload([*(each[0] for each in own), *(each[1] for each in own)], rows.device).view(
                2, -1
            )
            ids = ids.clamp(0, self._vocab - 1)  # those that do not exist are found later
            lost = [self._lost(self._counts.get(token, 0) + count) for _, token, count in own]
            fixed = self._repeated(rows[at, ids]) - transfers.upload(lost, rows.device, rows.dtype)
        if tables.seen is not None:
            rows.copy_(torch.where(tables.seen, self._repeated(rows), rows))
        if tables.lost is not None:
            rows.sub_(tables.lost)
        if own:
            rows[at, ids] = fixed

    def _repeated(self, logits: Tensor) -> Tensor:
        """Of tokens that occurred."""
        if self._repetition == 1.0:
            return logits
        return torch.where(logits > 0.0, logits / self._repetition, logits * self._repetition)

    def _lost(self, count: int) -> float:
        """What a token's logit loses that the answer holds so often."""
        return self._params.presence_penalty + self._params.frequency_penalty * count

    def _count(self) -> None:
        """Take note of tokens that were committed since."""
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
    """Logits at the rows of the token trees of several requests, as the options of each change them.

    Args:
        logits: `[rows, vocab]`, of one tree behind another: row 0 behind its committed text, row i + 1 behind node i.
        trees: their tokens are read where they matter, so a device is waited for.
        shapings: of each; None changes nothing.
        argmax: of each, whether only the likeliest token of a row counts: where a form allows that, it need not be
            worked out what else it allows.

    Returns:
        `[rows, vocab]`, float32, or float64 where the logits are, the given ones being left as they are; or the given
        ones, where nothing is changed.
    """
    changes = any(shaping is not None and shaping._changes for shaping in shapings)
    wide = _wide(logits) if changes else logits
    formed: list[tuple[Form, Sequence[Path], int, bool]] = []  # with the first row, and whether its argmax will do
    first = 0
    for tree, shaping, alone in zip(trees, shapings, argmax, strict=True):
        end = first + len(tree) + 1
        if shaping is not None:
            paths: Sequence[Path] = [(), *map(tree.path_tokens, range(len(tree)))] if shaping.reads_paths else ()
            shaping._change(wide[first:end], (0, *tree.shape.depths), paths)
            if shaping.form is not None:
                formed.append((shaping.form, paths, first, alone))
        first = end
    likeliest = most_likely(wide).tolist() if any(alone for *_, alone in formed) else []
    places: list[int] = []  # of rows that masks are needed for
    masks: list[NDArray[np.bool_]] = []
    for form, paths, first, alone in formed:
        left = [row for row, path in enumerate(paths) if not (alone and form.allows(path, likeliest[first + row]))]
        places += [first + row for row in left]
        masks += [form.masks([paths[row] for row in left])] if left else []
    if masks:  # one pass over all rows
        wide = wide if changes else _wide(logits)
        rows = wide[places]
        _forbid(rows, np.concatenate(masks))
        wide[places] = rows
    return wide


def _wide(logits: Tensor) -> Tensor:
    """A copy in float32, or float64 where they are."""
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)


def _forbid(wide: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Set to minus infinity, in place, what masks `[rows, ids]` do not allow."""
    # The smaller of a logit and plus or minus infinity, which differ in the sign bit: torch's masked operations take
    # twice the time of all this on the CPU.
    known = torch.from_numpy(allowed).to(wide.device, torch.int32)
    bounds = known.sub_(1).bitwise_and_(_SIGN).bitwise_or_(_INFINITY).view(torch.float32).to(wide.dtype)
    rows = wide[:, : allowed.shape[1]]
    torch.minimum(rows, bounds, out=rows)


class _Tables:
    """By token, what committed text and options alone decide, each `[vocab]`; None where nothing does.

    Attributes:
        banned: bool.
        bias: is added.
        lost: is taken off.
        seen: bool: whether prompt or answer hold it.
    """

    def __init__(self) -> None:
        self.banned: Tensor | None = None
        self.bias: Tensor | None = None
        self.lost: Tensor | None = None
        self.seen: Tensor | None = None

    def take(self, tokens: Collection[int], lost: Callable[[int], float]) -> None:
        """Tokens were committed."""
        if not tokens:
            return
        if self.lost is not None:
            ids = transfers.upload(list(tokens), self.lost.device)
            self.lost[ids] = transfers.upload(list(map(lost, tokens)), self.lost.device, self.lost.dtype)
        if self.seen is not None:
            self.seen[transfers.upload(list(tokens), self.seen.device)] = True
