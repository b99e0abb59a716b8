"""vLLM's server with the one function put right that leaves options of drafted tokens unwritten on CPUs.

    .venv-vllm/bin/python benchmarks/vllm_put_right.py --model FOLDER ...

Its CPU build 0.32.0 judges drafted tokens at a temperature, top-k and top-p from uninitialised memory, however it
drafts (docs/certify_engines.md). Whether a drafter keeps the target's distribution shows only where that is mended.
"""

from __future__ import annotations

import runpy

import torch
from torch import Tensor


def copied_to_tokens(x: Tensor, ends: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Values of requests, once for each of their tokens.

    Args:
        x: a value of each request.
        ends: where each request's tokens end: [a, b] and [2, 5] become [a, a, b, b, b].
        tokens: of all requests.
        replace_from: a value that another stands for.
        replace_to: that other.
    """
    counts = ends.diff(prepend=torch.zeros_like(ends[:1])).long()
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that the server spawns
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = copied_to_tokens

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
