"""A plugin of vLLM 0.32's CPU build: temperature, top-k and top-p reach drafted tokens.

Without it what `expand_kernel` writes there goes into a copy wherever a value is no int64, and drafted tokens are
judged at whatever stood in memory (vllm-project/vllm issue 55005). With it the same certificates show whether that was
all. It runs inside vLLM's processes, found by the entry point beside it.
"""

from __future__ import annotations

from typing import Any

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(output: Any, values: Any, ends: Any, replace_from: float, replace_to: float, *more: Any) -> None:
    """Write each request's value to all of its drafted tokens; ends are their cumulated counts."""
    begin = 0
    for value, end in zip(values.tolist(), ends.tolist(), strict=True):
        output[begin:end] = replace_to if value == replace_from else value
        begin = end


def register() -> None:
    """Put it in the place of vLLM's own, whether that is registered already or not."""
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    if _KERNEL in dispatcher._registry:
        dispatcher.register_kernels({_KERNEL: expand})
