"""Run stateful modules (recurrences, short convolutions) with an explicit state, a class for each way of passing it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from truedraft.errors import UnsupportedModelError

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
