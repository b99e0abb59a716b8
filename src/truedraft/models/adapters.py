"""LoRA adapters (arXiv 2106.09685), B A x added to W x: merged into weights, or one per request, W read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from truedraft.errors import MissingExtraError, ModelError, UnsupportedModelError, first_line
from truedraft.files import refuse_no_adapter
from truedraft.models.attention import ForwardPlan
from truedraft.models.packed_linear import filled


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one linear layer: `down` `[rank, in]` and `up` `[out, rank]`, which is scaled."""

    down: Tensor
    up: Tensor

    def of(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`; a row does not depend on the others."""
        return linear(linear(filled(x), self.down), self.up)[: len(x)]


def merge_adapter(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """The model with an adapter merged into its weights; ModelError if the folder's does not fit or is broken."""
    return _with_adapters(model, {"merged": folder}).merge_and_unload(safe_merge=True)


def read_adapters(model: PreTrainedModel, folders: Mapping[str, str | Path]) -> dict[str, dict[str, LowRank]]:
    """What each adapter adds, by the names of linear layers; the model is not changed.

    Raises ModelError: one does not fit or cannot be read; UnsupportedModelError: it does more than add to linear
    layers.
    """
    from peft.tuners.lora import Linear

    adapted = _with_adapters(model, folders)
    found: dict[str, dict[str, LowRank]] = {name: {} for name in folders}
    try:
        for name, config in adapted.peft_config.items():
            _refuse_more(name, config)
        inner: nn.Module = adapted.base_model.model
        for path, module in inner.named_modules():
            for name in folders if isinstance(module, Linear) else ():
                if name in module.lora_A:
                    found[name][path] = LowRank(
                        module.lora_A[name].weight.detach().to(model.dtype).clone(),
                        (module.lora_B[name].weight.detach() * module.scaling[name]).to(model.dtype),
                    )
    finally:
        adapted.unload()
    return found


def _with_adapters(model: PreTrainedModel, folders: Mapping[str, str | Path]) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtraError("adapters need peft; install it by: pip install 'truedraft[train]'") from error
    wrapped: Any = None
    for name, folder in folders.items():
        refuse_no_adapter(folder)
        try:
            if wrapped is None:
                wrapped = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
            else:
                wrapped.load_adapter(str(folder), adapter_name=name)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ModelError(f"the adapter {str(folder)!r} does not fit this model: {first_line(error)}") from error
    return wrapped


def _refuse_more(name: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    for what, does in (
        (f"it is of the kind {kind}", kind != "LORA"),
        ("it is a DoRA", getattr(config, "use_dora", False)),
        ("it learned biases", getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False)),
        ("it holds whole modules", getattr(config, "modules_to_save", None)),
        ("it adds to single parameters", getattr(config, "target_parameters", None)),
    ):
        if does:
            raise UnsupportedModelError(
                f"the adapter {name!r} does more than add to linear layers ({what}), which requests of one batch "
                "cannot have each for itself; merge it at load (adapter=), for all requests"
            )


class Adapters:
    """A model's adapters; UnsupportedModelError if one adds to a layer that does not see all tokens in order."""

    def __init__(self, model: PreTrainedModel, weights: Mapping[str, Mapping[str, LowRank]]) -> None:
        self.names = tuple(weights)
        self._rows: list[tuple[slice, str]] = []
        self._total = 0
        for path in sorted({path for each in weights.values() for path in each}):
            module = model.get_submodule(path)
            if module is model.get_output_embeddings():
                raise UnsupportedModelError("an adapter adds to the LM head, which sees few rows; merge it at load")
            updates = {name: each[path] for name, each in weights.items() if path in each}
            module.forward = self._adapted(path, module.forward, updates)

    @contextmanager
    def following(self, plan: ForwardPlan) -> Iterator[None]:
        named = ((each, name) for each in plan.segments if (name := each.segment.adapter) is not None)
        self._rows = [(slice(each.start, each.start + each.count), name) for each, name in named]
        self._total = plan.tokens.shape[1]
        try:
            yield
        finally:
            self._rows = []

    def _adapted(
        self, path: str, forward: Callable[[Tensor], Tensor], updates: Mapping[str, LowRank]
    ) -> Callable[[Tensor], Tensor]:
        def adapted(x: Tensor) -> Tensor:
            output = forward(x)
            if not self._rows:
                return output
            given, sums = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
            if len(given) != self._total:
                raise UnsupportedModelError(
                    f"the layer {path} sees {len(given)} of {self._total} tokens, so requests cannot have adapters of "
                    "their own there; merge the adapter at load (adapter=)"
                )
            for rows, name in self._rows:
                if name in updates:
                    sums[rows] += updates[name].of(given[rows])
            return output

        return adapted
