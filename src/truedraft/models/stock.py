"""The model's own modules, with our attention in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.attention import attend_packed
from truedraft.models.bodies import Body
from truedraft.models.layouts import Attending
from truedraft.models.lm_head import lm_head_width
from truedraft.models.patterns import AttentionPattern
from truedraft.models.plan import ForwardPlan

_numbers = itertools.count()


class StockBody(Body):
    """Runs a packed forward through a model's own forward, by public doors only.

    Attention goes through the attention registry, positions and wanted rows through keyword arguments, and a
    forward pre-hook on the LM head reads its input.

    Args:
        model: switched to our attention.
        patterns: of each attention call.

    Raises:
        UnsupportedModelError: the family does not use the attention registry.
    """

    def __init__(self, model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> None:
        self._model = model
        self._runner = _Runner(patterns)
        self._runner.register(model)
        self._captured: list[Tensor] = []
        self._head = head = model.get_output_embeddings()
        head.register_forward_pre_hook(lambda _, inputs: self._captured.append(inputs[0]))
        # Stock kernels treat very short products differently. In float32 four rows cost 1.4 to 1.9 times what one
        # does, so there rows differ in their last bits and the promise is equality up to near ties (see `note`).
        self.least_rows = 1 if model.dtype in (torch.float32, torch.float64) else 4
        self.any_threads = model.device.type == "cpu" and model.dtype is torch.bfloat16
        self.fast_paths = ()

    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """See `Body.run`."""
        with self._runner.running(plan):
            self._captured.clear()
            output = self._model(
                input_ids=plan.tokens,
                position_ids=plan.positions,
                use_cache=False,
                logits_to_keep=plan.rows,
            )
            return output.logits[0], self._captured.pop()[0]

    def unembed(self, vectors: Tensor) -> Tensor:
        """See `Body.unembed`."""
        logits: Tensor = self._head(self._whole_rows(vectors, lm_head_width(self._head)))
        self._captured.clear()
        return logits[: len(vectors)]


class _Runner:
    """The attention function of one loaded model: a bound method, so that it knows the plan of the forward."""

    def __init__(self, patterns: Sequence[AttentionPattern]) -> None:
        self.name = f"truedraft-{next(_numbers)}"
        self._patterns = tuple(patterns)
        self._plan: ForwardPlan | None = None
        self._call = 0

    def register(self, model: PreTrainedModel) -> None:
        """Make this runner the model's attention."""
        AttentionInterface.register(self.name, self.attend)
        model.set_attn_implementation(self.name)
        if model.config._attn_implementation != self.name:
            raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' attention registry")

    def running(self, plan: ForwardPlan) -> _Running:
        """A context in which forwards of the model follow `plan`."""
        return _Running(self, plan)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,  # never built: the registry's mask functions do not know our name
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """What the model's layers call instead of their own attention; batch 1, all segments packed."""
        plan = self._plan
        if plan is None:
            raise ModelError(f"{type(module).__name__} was called outside truedraft; use LanguageModel.forward")
        if self._call == len(self._patterns):
            raise ModelError(f"{type(module).__name__} made more attention calls than when it was loaded")
        pattern = self._patterns[self._call]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        how = Attending(scale, softcap, s_aux)
        mixed = attend_packed(query[0], key[0], value[0], plan, self._call, pattern, how)
        self._call += 1
        return mixed[None].contiguous(), None  # some families take views of it


class _Running:
    """Holds a runner's plan for the duration of one forward."""

    def __init__(self, runner: _Runner, plan: ForwardPlan) -> None:
        self._runner = runner
        self._plan = plan

    def __enter__(self) -> None:
        self._runner._plan = self._plan
        self._runner._call = 0

    def __exit__(self, *_: object) -> None:
        self._runner._plan = None
