"""Layers with a state (recurrences, short convolutions) in a packed forward over token trees.

transformers' own modules compute them. A token starts from its parent's state, as in plain decoding, so its bits do not
depend on the other tokens of the forward. All tokens at one depth, of all requests, go through a module as one batch;
its input and output projections are computed once for all tokens, which reads their weights only once. Prompt tokens
are read in pieces that end at fixed positions, so that their bits do not depend on the chunks. The state after every
token is kept until the request's next commit, so a rejected draft costs no forward.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.attention import ForwardPlan, SegmentPlan
from truedraft.models.cache.family import PIECE, StateRow

States: TypeAlias = dict[str, Tensor]
"""By name, `[batch, ...]` each; empty at the start of a text."""

_XLSTM_STATES = ("matrix", "normaliser", "largest")
_KEYWORDS = ("cache", "cache_params", "past_key_values")  # the last two until transformers 5.24
_UPDATES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}


class StateAdapter(ABC):
    """Runs one module from given states.

    `shift` names a state that equals the module's input at the previous token. Then all linear layers of the module but
    the last depend on this token and the previous one only, however far the other states reach back.
    """

    shift: str | None = None

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._forward: Callable[..., Any] = module.forward

    @abstractmethod
    def run(self, hidden: Tensor, states: States) -> tuple[Any, States]:
        """Run `[batch, tokens, width]` from `states`, which may be overwritten; returns output and last states."""


def adapter_for(module: nn.Module) -> type[StateAdapter] | None:
    """A module's `StateAdapter` class, or None without a state; UnsupportedModelError if it has keys and values too."""
    known = _OWN_WAYS.get(type(module).__name__)
    if known is not None:
        return known
    names = _names_used(type(module))
    if not names & _UPDATES or cache_keyword(module) is None:
        return None
    if "update" in names:
        raise UnsupportedModelError(
            f"{type(module).__name__} is attention and carries a state in one module, which truedraft cannot take "
            "back; use another model"
        )
    return _CacheAdapter


def carries_states(model: nn.Module) -> bool:
    """Whether any submodule keeps states in one of the known ways."""
    return any(type(module).__name__ in _OWN_WAYS or _names_used(type(module)) & _UPDATES for module in model.modules())


def _names_used(kind: type) -> set[str]:
    names: set[str] = set()
    for each in kind.__mro__:
        if each is nn.Module:
            break
        functions = (inspect.unwrap(value) for value in vars(each).values() if inspect.isfunction(value))
        for function in functions:
            names.update(function.__code__.co_names)
    return names


def cache_keyword(module: nn.Module) -> str | None:
    """The keyword by which a module's forward takes transformers' cache; a model's output has the same name for it."""
    known = inspect.signature(type(module).forward).parameters
    return next((name for name in _KEYWORDS if name in known), None)


class _StateCache:
    """Replaces transformers' cache for one module: the states of this layer only, for each text of a batch."""

    def __init__(self, states: States) -> None:
        self.states = states

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
        """Keep the last entries `[batch, channels, kernel]`; returns the previous and the new ones."""
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

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:  # MiniMax's name for its recurrent state
        return self.states.get("recurrent0")

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.states["recurrent0"] = linear_cache


class _CacheAdapter(StateAdapter):
    """Modules that take transformers' cache; other required arguments matter for padded texts only and are None."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._keyword = cache_keyword(module) or ""
        params = list(inspect.signature(type(module).forward).parameters.values())[2:]
        self._nothing = {
            each.name: None for each in params if each.default is each.empty and each.kind < each.VAR_POSITIONAL
        }

    def run(self, hidden: Tensor, states: States) -> tuple[Any, States]:
        cache = _StateCache(states)
        return self._forward(hidden, **self._nothing | {self._keyword: cache}), cache.states


class _RecurrentGemmaAdapter(StateAdapter):
    """The state is in the block and its recurrence. Its own code skips the convolution's state for several tokens at
    once. Positions only mark whether a text begins."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._convolution: Any = module.conv_1d

    def run(self, hidden: Tensor, states: States) -> tuple[Any, States]:
        module, convolution, first = self._module, self._convolution, 1 if states else 0
        if not states:
            states = {
                "conv": hidden.new_zeros(len(hidden), module.lru_width, module.conv1d_width - 1),
                "recurrent": hidden.new_zeros(len(hidden), module.lru_width, dtype=torch.float32),
            }
        module.conv1d_state, module.rg_lru.recurrent_states = states["conv"], states["recurrent"]
        before, seen = states["conv"], []

        def convolve(entries: Tensor) -> Tensor:
            seen.append(torch.cat([before, entries], dim=-1))
            return conv1d(seen[0], convolution.weight, convolution.bias, groups=convolution.groups)

        convolution.forward = convolve
        try:
            positions = torch.arange(first, first + hidden.shape[1], device=hidden.device)[None]
            output = self._forward(hidden, positions, None, use_cache=True)
            conv = seen[0][..., -before.shape[-1] :] if seen else module.conv1d_state
            return output, {"conv": conv, "recurrent": module.rg_lru.recurrent_states}
        finally:
            del convolution.forward
            module.conv1d_state = module.rg_lru.recurrent_states = None


class _XLSTMAdapter(StateAdapter):
    """The state is an argument and is returned after the output; `generate` keeps it in the model's dtype. Without a
    state, transformers' chunked code multiplies two dtypes and fails in bfloat16, so a text begins with zeros."""

    def run(self, hidden: Tensor, states: States) -> tuple[Any, States]:
        output, after = self._forward(hidden, tuple((self._begin(hidden) | states).values()))
        return (output, None), {name: state.to(hidden.dtype) for name, state in zip(_XLSTM_STATES, after, strict=True)}

    def _begin(self, hidden: Tensor) -> States:
        heads = self._module.config.num_heads
        keys, values = self._module.qk_dim // heads, self._module.v_dim // heads
        shapes = (heads, keys, values), (heads, keys), (heads, 1)
        return {name: hidden.new_zeros(len(hidden), *shape) for name, shape in zip(_XLSTM_STATES, shapes, strict=True)}


class _Slot:
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, place: Any) -> Tensor:
        return self.value

    def __setitem__(self, place: Any, value: Tensor) -> None:
        self.value = value


class _RwkvAdapter(StateAdapter):
    """One list has the states of all layers: five tensors, the first for the input of the feed-forward part."""

    shift = "shift"
    _slot = 1  # index of the module's input in the list

    def run(self, hidden: Tensor, states: States) -> tuple[Any, States]:
        states = self._begin(hidden) | states
        shift = states["shift"]
        # With one token for each text, the module would take texts for tokens.
        slots = {"shift": _Slot(shift[:, None] if hidden.shape[1] == 1 else shift)}
        slots |= {name: _Slot(state) for name, state in states.items() if name != "shift"}
        listed: list[Any] = [None, None, *(slots.get(name) for name in ("numerator", "denominator", "largest"))]
        listed[self._slot] = slots["shift"]
        output, _ = self._forward(hidden, state=listed)
        return (output, None), {name: slot.value for name, slot in slots.items()}

    def _begin(self, hidden: Tensor) -> States:
        batch = len(hidden)
        sums = hidden.new_zeros(batch, self._module.attention_hidden_size, dtype=torch.float32)
        return {
            "shift": hidden.new_zeros(batch, hidden.shape[-1]),
            "numerator": sums,
            "denominator": sums.clone(),
            "largest": sums - 1e30,  # as `generate` begins
        }


class _RwkvFeedForwardAdapter(_RwkvAdapter):
    _slot = 0

    def _begin(self, hidden: Tensor) -> States:
        return {"shift": hidden.new_zeros(len(hidden), hidden.shape[-1])}


_OWN_WAYS: dict[str, type[StateAdapter]] = {
    "RecurrentGemmaRecurrentBlock": _RecurrentGemmaAdapter,
    "RwkvSelfAttention": _RwkvAdapter,
    "RwkvFeedForward": _RwkvFeedForwardAdapter,
    "xLSTMLayer": _XLSTMAdapter,
}

Run: TypeAlias = Callable[[Tensor, States], tuple[list[Tensor], States]]
"""A module on `[batch, tokens, width]`, from given states."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the standard deviation; other dtypes: _COARSE
_COARSE = 5e-2


def carrying_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that carry states, in forward order; UnsupportedModelError if one keeps keys and values too."""
    return [module for module in model.modules() if adapter_for(module) is not None]


@contextmanager
def without_states(modules: Sequence[nn.Module]) -> Iterator[None]:
    """These modules return zeros within this context, so that no token sees another through them."""

    def zeros(forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        output = forward(*args, **given)
        parts = output if isinstance(output, tuple) else (output,)
        found = tuple(torch.zeros_like(part) if isinstance(part, Tensor) else None for part in parts)
        return found if isinstance(output, tuple) else found[0]

    for module in modules:
        module.forward = partial(zeros, module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


Place = tuple[SegmentPlan, int]
"""A new token: its segment, and its index among the uncommitted tokens."""


class _Order:
    """The order of the new tokens: `pieces` of prompts (segment, first token, end), then `levels`, by parent."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.segments = plan.segments
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
        part, node = place
        return part.start + node - part.segment.written


class Recurrence:
    """The `carrying_modules` of one model, with forwards that follow a plan; `width` is that of their input."""

    def __init__(self, modules: Sequence[nn.Module], width: int) -> None:
        self._order: _Order | None = None
        for number, module in enumerate(modules):
            _Layer(self, module, number, width)

    @contextmanager
    def following(self, plan: ForwardPlan) -> Iterator[None]:
        self._order = _Order(plan)
        try:
            yield
        finally:
            self._order = None

    @property
    def order(self) -> _Order:
        if self._order is None:
            raise ModelError("a layer was called outside truedraft; use LanguageModel.forward")
        return self._order


class _Layer:
    def __init__(self, owner: Recurrence, module: nn.Module, number: int, width: int) -> None:
        self._owner, self._number = owner, number
        kind = adapter_for(module)
        assert kind is not None
        self._adapter = kind(module)
        self._name = type(module).__name__
        weight = min(module.parameters(), key=Tensor.element_size)  # some weights are kept wider than activations
        hidden = torch.linspace(-1.0, 1.0, 9 * width, device=weight.device).sin_().view(1, 9, width).to(weight.dtype)
        with torch.inference_mode():
            self._places = self._places_of_vectors(hidden)
            self._continues = self._can_continue(hidden)
            self._products = _Products(module, self._adapter.shift, lambda: self._run(hidden, {})[0], hidden)
        module.forward = self.mix

    def _places_of_vectors(self, hidden: Tensor) -> tuple[int, ...] | None:
        """Indices of the outputs with one vector for each token; None if the output is a single tensor."""
        found: list[set[int]] = []
        for length in (4, 5):  # a state may have the length of one text by chance, but not of two
            output, _ = self._adapter.run(hidden[:, :length], {})
            if isinstance(output, Tensor):
                return None
            self._parts = len(output)
            vectors = [isinstance(part, Tensor) and part.shape[:2] == (1, length) for part in output]
            found.append({place for place, is_vector in enumerate(vectors) if is_vector})
        places = tuple(sorted(found[0] & found[1]))
        if not places:
            raise UnsupportedModelError(f"{self._name} gives no vectors; truedraft cannot run it packed")
        return places

    def _run(self, hidden: Tensor, states: States) -> tuple[list[Tensor], States]:
        output, after = self._adapter.run(hidden, states)
        return [output] if self._places is None else [output[place] for place in self._places], after

    def _can_continue(self, hidden: Tensor) -> bool:
        """Whether reading several tokens from a state equals reading one text; some modules ignore it then."""
        whole, _ = self._run(hidden, {})
        _, states = self._run(hidden[:, :4], {})
        rest, _ = self._run(hidden[:, 4:], states)
        allowed = _TOLERANCE.get(hidden.dtype, _COARSE)
        return all(
            (one[:, 4:] - other).abs().max().item() <= allowed * one[:, 4:].float().std().item()
            for one, other in zip(whole, rest, strict=True)
        )

    def mix(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """The replaced forward, on `[1, total, width]`, all segments packed; rows of padding get zeros."""
        order = self._owner.order
        states: dict[int, list[StateRow | None]] = {
            id(part): [None] * (len(part.segment.shape) - part.segment.written) for part in order.segments
        }
        rows: list[Tensor] = []
        outputs: list[list[Tensor]] = []

        def note(places: Sequence[Place], found: States, output: list[Tensor]) -> None:
            for row, (part, node) in enumerate(places):
                states[id(part)][node - part.segment.written] = StateRow(found, row)
            outputs.append(output)

        with self._products.of(hidden_states, self._before(hidden_states), self._run):
            for part, start, end in order.pieces:
                whole = self._continues or part.length + start == 0
                for first, last in [(start, end)] if whole else pairwise(range(start, end + 1)):
                    before = self._state_before((part, first), states)
                    known = {} if before is None else dict(before.copied().states)
                    own = slice(part.start + first, part.start + last)
                    output, found = self._products.run(own, self._run, hidden_states[:, own], known)
                    rows.append(torch.arange(own.start, own.stop))
                    note([(part, last - 1)], found, [each[0] for each in output])
                after = states[id(part)][end - 1]
                assert after is not None
                part.segment.cache.family.carried.mark(self._number, part.length + end, after)
            for level in order.levels:
                for places, known in self._batches(level, states):
                    index = torch.tensor([order.row(place) for place in places], device=hidden_states.device)
                    output, found = self._products.run(index, self._run, hidden_states[0, index][:, None], known)
                    rows.append(index)
                    note(places, found, [each[:, 0] for each in output])
            for part in order.segments:
                part.segment.cache.family.carried.note(self._number, states[id(part)], part.segment.written)
            index = torch.cat(rows).to(hidden_states.device)
            mixed = []
            for each in zip(*outputs, strict=True):
                whole = each[0].new_zeros(hidden_states.shape[1], *each[0].shape[1:])
                whole[index] = torch.cat(each)
                mixed.append(self._products.finish(whole[None]))
        return self._given(mixed)

    def _given(self, mixed: list[Tensor]) -> Any:
        if self._places is None:
            return mixed[0]
        output: list[Tensor | None] = [None] * self._parts
        for place, each in zip(self._places, mixed, strict=True):
            output[place] = each
        return tuple(output)

    def _before(self, hidden: Tensor) -> Tensor | None:
        """The module's input at each token's parent, `[1, total, width]`; None if its projections do not use it."""
        name = self._adapter.shift
        if name is None:
            return None
        before = torch.zeros_like(hidden)
        here: list[int] = []
        there: list[int] = []
        for part in self._owner.order.segments:
            segment = part.segment
            for row, parent in enumerate(segment.shape.parents[segment.written :], start=part.start):
                if parent >= segment.written:
                    here.append(row)
                    there.append(part.start + parent - segment.written)
                    continue
                known = segment.cache.family.carried.after(self._number, parent)
                if known is not None:
                    before[0, row] = known.states[name][known.row]
        if here:
            before[0, here] = hidden[0, there]
        return before

    def _state_before(self, place: Place, states: dict[int, list[StateRow | None]]) -> StateRow | None:
        part, node = place
        segment = part.segment
        parent = segment.shape.parents[node]
        if parent < segment.written:
            return segment.cache.family.carried.after(self._number, parent)
        return states[id(part)][parent - segment.written]

    def _batches(
        self, level: Sequence[Place], states: dict[int, list[StateRow | None]]
    ) -> Iterator[tuple[list[Place], States]]:
        before = [(place, self._state_before(place, states)) for place in level]
        if begin := [place for place, state in before if state is None]:
            yield begin, {}
        if known := [(place, state) for place, state in before if state is not None]:
            yield [place for place, _ in known], _gathered([state for _, state in known])


def _gathered(rows: Sequence[StateRow]) -> States:
    """Copies of some states as a batch, because modules write into them."""
    first = rows[0].states
    if all(each.states is first for each in rows):
        index = torch.tensor([each.row for each in rows], device=next(iter(first.values())).device)
        return {name: state.index_select(0, index) for name, state in first.items()}
    return {name: torch.cat([each.states[name][each.row : each.row + 1] for each in rows]) for name in first}


class _Products:
    """The input and output projections of a module, computed for all tokens of a forward at once.

    With `shift` they depend on the previous token's input, too; `run` runs the module on `[1, tokens, width]`.
    """

    def __init__(self, module: nn.Module, shift: str | None, run: Callable[[], list[Tensor]], hidden: Tensor) -> None:
        linears = [each for each in module.modules() if hasattr(each, "in_features") and hasattr(each, "out_features")]
        seen: list[tuple[nn.Module, Tensor, Tensor]] = []
        with ExitStack() as hooks:
            for each in linears:
                hook = each.register_forward_hook(lambda linear, given, output: seen.append((linear, given[0], output)))
                hooks.callback(hook.remove)
            result = run()
        self._shift = shift
        last = [linear for linear, _, output in seen if len(result) == 1 and _is_same(output, result[0])]
        self._last = last[0] if last else None
        self._first = [
            linear for linear, given, _ in seen if linear is not self._last and (shift or _is_same(given, hidden))
        ]
        self._forwards = {id(each): each.forward for each in linears}
        self._made: dict[int, Tensor] = {}  # by linear layer, for all tokens
        self._own: slice | Tensor | None = None  # rows of the tokens that run
        self._given: Tensor | None = None  # the module's input for them
        for each in self._first:
            each.forward = partial(self._part, each)
        if self._last is not None:
            self._last.forward = lambda given: given

    @contextmanager
    def of(self, hidden: Tensor, before: Tensor | None, run: Run) -> Iterator[None]:
        """In the context input projections of `hidden`, `[1, total, width]`, are used; `before` is for `shift`."""
        if before is None:
            self._made = {id(each): self._forwards[id(each)](hidden) for each in self._first}
        else:  # run the module on each token separately, only for its input projections
            self._own = self._given = None
            assert self._shift is not None
            run(hidden[0][:, None], {self._shift: before[0]})
        try:
            yield
        finally:
            self._made.clear()

    def run(self, own: slice | Tensor, module: Run, hidden: Tensor, states: States) -> tuple[list[Tensor], States]:
        self._own, self._given = own, hidden
        try:
            return module(hidden, states)
        finally:
            self._own = self._given = None

    def _part(self, linear: nn.Module, given: Tensor) -> Tensor:
        key = id(linear)
        if self._own is None:  # `[total, 1, width]`
            output = self._forwards[key](given)
            self._made[key] = output.transpose(0, 1)
            return output
        if not self._shift and (self._given is None or not _is_same(given, self._given)):
            return self._forwards[key](given)
        made = self._made[key]
        return made[:, self._own] if isinstance(self._own, slice) else made[0, self._own][:, None]

    def finish(self, mixed: Tensor) -> Tensor:
        return mixed if self._last is None else self._forwards[id(self._last)](mixed)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
