"""Layers that carry a state from token to token, recurrences and short convolutions, in a packed forward over trees.

transformers' own modules compute them: a token behind its parent's state, as in plain decoding, so whatever shares the
forward a token gets the bits that it would get alone. All tokens at one depth, of all requests, go through a module
together as a batch. What that would cost in weights read again for each depth is spared: products with what enters the
module, and the one that gives what leaves it, are made once for all tokens.

Tokens of a prompt are read in pieces that end at fixed positions, so that their bits do not hang on how it was cut.

The state behind every token stays until the request's next commit, so a rejected draft costs no forward: the state
behind the last accepted token is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from truedraft.cache.carried import PIECE, StateRow
from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.packing import ForwardPlan, SegmentPlan

_KEYWORDS = ("cache_params", "past_key_values")
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the spread; in other dtypes _COARSE
_COARSE = 5e-2


def carries_states(model: nn.Module) -> bool:
    """Whether a module keeps states in transformers' cache for linear attention."""
    return any(_names_used(type(module)) & _UPDATES for module in model.modules())


def carrying_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that carry states by transformers' cache for linear attention, in the order of the forward.

    Raises:
        UnsupportedModelError: one of them keeps keys and values too.
    """
    found = []
    for module in model.modules():
        names = _names_used(type(module))
        if not names & _UPDATES or _keyword_of(module) is None:
            continue
        if "update" in names:
            raise UnsupportedModelError(
                f"{type(module).__name__} is attention and carries a state in one module, which truedraft cannot take "
                "back; use another model"
            )
        found.append(module)
    return found


def _names_used(kind: type) -> set[str]:
    """What the methods of a module's classes refer to."""
    names: set[str] = set()
    for each in kind.__mro__:
        if each is nn.Module:
            break
        functions = (inspect.unwrap(value) for value in vars(each).values() if inspect.isfunction(value))
        for function in functions:
            names.update(function.__code__.co_names)
    return names


def _keyword_of(module: nn.Module) -> str | None:
    known = inspect.signature(type(module).forward).parameters
    return next((name for name in _KEYWORDS if name in known), None)


@contextmanager
def without_states(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Meanwhile these modules give zeros, so that no token sees another through them."""
    for module in modules:
        module.forward = lambda hidden_states, *_, **__: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


class _StateCache:
    """What a module takes for transformers' cache: one state for each of a batch of texts, of this layer alone."""

    def __init__(self, states: dict[str, Tensor] | None = None) -> None:
        self.states: dict[str, Tensor] = states if states is not None else {}

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        return bool(self.states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last entries `[batch, channels, kernel]`; returns those before and the new ones."""
        name = f"conv{state_idx}"
        before = self.states.get(name)
        if before is None:
            kernel = conv_kernel_size or new.shape[-1]
            whole = pad(new, (kernel - new.shape[-1], 0)) if new.shape[-1] < kernel else new
        else:
            kernel = before.shape[-1]
            whole = torch.cat([before, new], dim=-1)
        self.states[name] = whole[..., -kernel:].clone()
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states[f"recurrent{state_idx}"] = new
        return new


Place = tuple[SegmentPlan, int]
"""A new token: its segment, and its number among the uncommitted ones."""


class _Order:
    """In which order the new tokens of a forward are computed; the same for all layers.

    Attributes:
        pieces: of prompts: a segment, and its tokens from one to before another.
        levels: all other tokens, each behind its parent's level.
    """

    def __init__(self, plan: ForwardPlan) -> None:
        self.pieces: list[tuple[SegmentPlan, int, int]] = []
        self.levels: list[list[Place]] = []
        for part in plan.segments:
            segment, prompt = part.segment, part.segment.prompt
            start = 0
            while start < prompt:
                end = min(prompt, start + PIECE - (part.length + start) % PIECE)
                self.pieces.append((part, start, end))
                start = end
            level_of: dict[int, int] = {}
            for node in range(segment.written + prompt, len(segment.shape)):
                level = level_of[node] = 1 + level_of.get(segment.shape.parents[node], -1)
                if level == len(self.levels):
                    self.levels.append([])
                self.levels[level].append((part, node))

    @staticmethod
    def row(place: Place) -> int:
        """Of the pack."""
        part, node = place
        return part.start + node - part.segment.written


class Recurrence:
    """The layers of one model that carry states, switched to follow the plans of packed forwards.

    Args:
        modules: `carrying_modules` of the model.
        width: of what enters them.
    """

    def __init__(self, modules: Sequence[nn.Module], width: int) -> None:
        self._plan: ForwardPlan | None = None
        self._order: _Order | None = None
        for number, module in enumerate(modules):
            _Layer(self, module, number, width)

    @contextmanager
    def following(self, plan: ForwardPlan) -> Iterator[None]:
        """Forwards of the model follow `plan` meanwhile."""
        self._plan, self._order = plan, _Order(plan)
        try:
            yield
        finally:
            self._plan = self._order = None

    @property
    def order(self) -> _Order:
        """Of the running forward."""
        if self._order is None:
            raise ModelError("a layer was called outside truedraft; use LanguageModel.forward")
        return self._order

    @property
    def plan(self) -> ForwardPlan:
        """Of the running forward."""
        assert self._plan is not None
        return self._plan


class _Layer:
    """One module in place of whose forward this stands."""

    def __init__(self, owner: Recurrence, module: nn.Module, number: int, width: int) -> None:
        self._owner, self._number = owner, number
        self._keyword = _keyword_of(module) or ""
        self._forward: Callable[..., Any] = module.forward
        self._name = type(module).__name__
        weight = min(module.parameters(), key=Tensor.element_size)  # some are kept wider than vectors are
        hidden = torch.linspace(-1.0, 1.0, 9 * width, device=weight.device).sin_().view(1, 9, width).to(weight.dtype)
        with torch.inference_mode():
            self._goes_on = self._can_go_on(hidden)
            self._products = _Products(module, lambda: self._run(hidden, _StateCache()), hidden)
        module.forward = self.mix

    def _run(self, hidden: Tensor, cache: _StateCache) -> Tensor:
        output = self._forward(hidden, **{self._keyword: cache})
        if not isinstance(output, Tensor):
            raise UnsupportedModelError(f"{self._name} gives more than vectors; truedraft cannot run it packed")
        return output

    def _can_go_on(self, hidden: Tensor) -> bool:
        """Whether the module reads several tokens behind a state at once; some forget the state then."""
        first, rest = hidden[:, :4], hidden[:, 4:]
        states = _StateCache()
        self._run(first, states)
        together = self._run(rest, _StateCache({name: state.clone() for name, state in states.states.items()}))
        alone = torch.cat([self._run(rest[:, at : at + 1], states) for at in range(rest.shape[1])], dim=1)
        allowed = _TOLERANCE.get(hidden.dtype, _COARSE) * alone.float().std().item()
        return (together - alone).abs().max().item() <= allowed

    def mix(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What the model's layers call: `[1, total, width]`, all segments packed; rows of padding get zeros."""
        order, plan = self._owner.order, self._owner.plan
        states: dict[int, list[StateRow | None]] = {
            id(part): [None] * (len(part.segment.shape) - part.segment.written) for part in plan.segments
        }
        rows: list[Tensor] = []
        outputs: list[Tensor] = []

        def note(places: Sequence[Place], found: dict[str, Tensor], output: Tensor) -> None:
            for row, (part, node) in enumerate(places):
                states[id(part)][node - part.segment.written] = StateRow(found, row)
            outputs.append(output)

        with self._products.of(hidden_states):
            for part, start, end in order.pieces:
                whole = self._goes_on or part.length + start == 0
                for first, last in [(start, end)] if whole else _singles(start, end):
                    before = self._behind((part, first), states)
                    cache = _StateCache({} if before is None else dict(before.alone().states))
                    own = slice(part.start + first, part.start + last)
                    output = self._products.run(own, partial(self._run, hidden_states[:, own], cache))
                    rows.append(torch.arange(own.start, own.stop))
                    note([(part, last - 1)], cache.states, output[0])
                behind = states[id(part)][end - 1]
                assert behind is not None
                part.segment.cache.carried.mark(self._number, part.length + end, behind)
            for level in order.levels:
                for places, cache in self._batches(level, states):
                    index = torch.tensor([order.row(place) for place in places], device=hidden_states.device)
                    each = hidden_states[0, index][:, None]
                    output = self._products.run(index, partial(self._run, each, cache))
                    rows.append(index)
                    note(places, cache.states, output[:, 0])
            for part in plan.segments:
                part.segment.cache.carried.note(self._number, states[id(part)], part.segment.written)
            mixed = outputs[0].new_zeros(hidden_states.shape[1], outputs[0].shape[-1])
            mixed[torch.cat(rows).to(mixed.device)] = torch.cat(outputs)
            return self._products.finish(mixed[None])

    def _behind(self, place: Place, states: dict[int, list[StateRow | None]]) -> StateRow | None:
        """The state that a token goes on from."""
        part, node = place
        segment = part.segment
        parent = segment.shape.parents[node]
        if parent < segment.written:
            return segment.cache.carried.behind(self._number, parent)
        return states[id(part)][parent - segment.written]

    def _batches(
        self, level: Sequence[Place], states: dict[int, list[StateRow | None]]
    ) -> Iterator[tuple[list[Place], _StateCache]]:
        """The tokens of a level that can be computed together: those that begin a text, and all others."""
        before = [self._behind(place, states) for place in level]
        begin = [place for place, state in zip(level, before, strict=True) if state is None]
        if begin:
            yield begin, _StateCache()
        known = [state for state in before if state is not None]
        if known:
            places = [place for place, state in zip(level, before, strict=True) if state is not None]
            yield places, _StateCache(_gathered(known))


def _singles(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, at + 1) for at in range(start, end)]


def _gathered(rows: Sequence[StateRow]) -> dict[str, Tensor]:
    """Copies of some states, as a batch; modules write into them."""
    first = rows[0].states
    if all(each.states is first for each in rows):
        index = torch.tensor([each.row for each in rows], device=next(iter(first.values())).device)
        return {name: state.index_select(0, index) for name, state in first.items()}
    return {name: torch.cat([each.states[name][each.row : each.row + 1] for each in rows]) for name in first}


class _Products:
    """The linear layers at both ends of a module, which multiply all tokens of a forward at once.

    Args:
        module: that carries a state.
        run: runs it on `hidden`, which shows which linear layers these are.
        hidden: `[1, tokens, width]`.
    """

    def __init__(self, module: nn.Module, run: Callable[[], Tensor], hidden: Tensor) -> None:
        linears = [each for each in module.modules() if hasattr(each, "in_features") and hasattr(each, "out_features")]
        seen: list[tuple[nn.Module, Tensor, Tensor]] = []
        hooks = [
            each.register_forward_hook(lambda linear, given, output: seen.append((linear, given[0], output)))
            for each in linears
        ]
        try:
            result = run()
        finally:
            for hook in hooks:
                hook.remove()
        self._first = [linear for linear, given, _ in seen if _is_same(given, hidden)]
        self._last = next((linear for linear, _, output in seen if _is_same(output, result)), None)
        self._forwards = {id(each): each.forward for each in linears}
        self._made: dict[int, Tensor] = {}  # by linear layer, for all tokens
        self._own: slice | Tensor | None = None  # rows of the tokens that run
        for each in self._first:
            each.forward = lambda _, linear=each: self._part(linear)
        if self._last is not None:
            self._last.forward = lambda given: given

    @contextmanager
    def of(self, hidden: Tensor) -> Iterator[None]:
        """Multiply what enters the module."""
        self._made = {id(each): self._forwards[id(each)](hidden) for each in self._first}
        try:
            yield
        finally:
            self._made.clear()

    def run(self, own: slice | Tensor, module: Callable[[], Tensor]) -> Tensor:
        """Run the module on some of the tokens: one behind another, or one in each of a batch of texts."""
        self._own = own
        try:
            return module()
        finally:
            self._own = None

    def _part(self, linear: nn.Module) -> Tensor:
        made = self._made[id(linear)]
        assert self._own is not None
        return made[:, self._own] if isinstance(self._own, slice) else made[0, self._own][:, None]

    def finish(self, mixed: Tensor) -> Tensor:
        """Multiply what leaves it."""
        return mixed if self._last is None else self._forwards[id(self._last)](mixed)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
