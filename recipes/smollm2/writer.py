"""Lets a Llama model write thousands of answers at once on one GPU, and keeps the vectors that gave their tokens.

The engine writes text for trainings, too; this writer only knows plain decoding of one architecture and takes 2,048
rows at a time, where the engine takes dozens. Rows that end are taken out of the batch when half of it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

_PREFILL = 64  # rows of prompts that are read together
_LOOKED = 8  # steps between two looks at how many rows have ended


@dataclass
class Written:
    number: int
    tokens: Tensor
    hidden: Tensor
    stopped: bool


class Writer:
    def __init__(self, model: LlamaForCausalLM, stop_ids: Sequence[int]) -> None:
        config = model.config
        self._inner, self._head = model.model, model.lm_head
        self._layers = model.model.layers
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = config.head_dim
        self._device, self._type = model.device, model.dtype
        theta = config.rope_parameters["rope_theta"]
        half = torch.arange(0, self._size, 2, device=self._device, dtype=torch.float32)
        self._frequencies = theta ** (-half / self._size)
        self._stop_ids = torch.tensor(list(stop_ids), device=self._device)

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], most: int, generator: torch.Generator
    ) -> Iterator[Written]:
        """Answer some prompts together.

        Args:
            prompts: token ids.
            temperatures: of each; 0 is greedy.
            most: tokens of an answer.
            generator: on the device, for the noise.
        """
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=self._device)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=self._device)
        shape = (len(self._layers), 2, len(prompts), self._kv_heads, longest + most, self._size)
        cache = torch.zeros(shape, dtype=self._type, device=self._device)
        hidden = torch.cat(
            [
                self._forward(ids[rows], cache[:, :, rows], pads[rows], 0)[:, -1]
                for rows in (slice(first, first + _PREFILL) for first in range(0, len(prompts), _PREFILL))
            ]
        )
        heat = torch.tensor(list(temperatures), device=self._device, dtype=torch.float32)
        row_numbers = torch.arange(len(prompts), device=self._device)  # of the prompts in the batch
        tokens = torch.zeros(len(prompts), most, dtype=torch.int64, device=self._device)
        vectors = torch.zeros(len(prompts), most, hidden.shape[-1], dtype=torch.bfloat16, device=self._device)
        ends = torch.full((len(prompts),), most, device=self._device)
        stopped = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        for step in range(most):
            token = self._draw(hidden, heat, generator)
            tokens[row_numbers, step], vectors[row_numbers, step] = token, hidden.to(torch.bfloat16)
            over = torch.isin(token, self._stop_ids) & ~stopped[row_numbers]
            ends[row_numbers[over]], stopped[row_numbers[over]] = step + 1, True
            if step % _LOOKED == 0:
                running = ~stopped[row_numbers]
                left = int(running.sum())
                if not left:
                    break
                if left <= len(row_numbers) // 2:
                    kept = running.nonzero()[:, 0]
                    cache, pads, heat = cache[:, :, kept], pads[kept], heat[kept]
                    row_numbers, token = row_numbers[kept], token[kept]
            if step + 1 < most:
                hidden = self._forward(token[:, None], cache, pads, longest + step)[:, 0]
        tokens, lengths, over_at = tokens.cpu(), ends.tolist(), stopped.tolist()
        for number, length in enumerate(lengths):
            yield Written(number, tokens[number, :length], vectors[number, :length], over_at[number])

    def _draw(self, hidden: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
        """A token of each row: the likeliest where its temperature is 0, else by Gumbel's noise."""
        logits = self._head(hidden).float()
        noise = torch.empty_like(logits).exponential_(generator=generator).log_().mul_(heat[:, None])
        return (logits - noise).argmax(dim=-1)

    def _forward(self, ids: Tensor, cache: Tensor, pads: Tensor, start: int) -> Tensor:
        """Vectors `[rows, length, width]` that enter the LM head; keys and values go to `cache` from `start` on.

        Args:
            ids: `[rows, length]`.
            cache: `[layers, 2, rows, kv heads, room, head size]`.
            pads: `[rows]`, entries at the front that are no tokens.
            start: entries of the cache before these.
        """
        rows, length = ids.shape
        end = start + length
        places = torch.arange(start, end, device=ids.device)
        angles = (places[None] - pads[:, None]).clamp(min=0)[..., None].float() * self._frequencies
        cos, sin = (torch.cat([each, each], -1)[:, None].to(self._type) for each in (angles.cos(), angles.sin()))
        entries = torch.arange(end, device=ids.device)
        seen = (entries[None, None] <= places[None, :, None]) & (entries[None, None] >= pads[:, None, None])
        seen |= (places[None, :] < pads[:, None])[..., None]  # what is no token sees all, so that it is no NaN
        mask = torch.zeros(seen.shape, dtype=self._type, device=ids.device).masked_fill_(~seen, -torch.inf)
        x = self._inner.embed_tokens(ids)
        group = self._heads // self._kv_heads
        for layer, (keys, values) in zip(self._layers, cache, strict=True):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            query, key, value = (
                part(y).view(rows, length, -1, self._size).transpose(1, 2)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys[:, :, start:end], values[:, :, start:end] = turned(key, cos, sin), value
            query = turned(query, cos, sin).reshape(rows, self._kv_heads, group * length, self._size)
            scores = query @ keys[:, :, :end].mT * self._size**-0.5
            scores = scores.view(rows, self._kv_heads, group, length, end) + mask[:, None, None]
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(self._type)
            mixed = weights.view(rows, self._kv_heads, group * length, end) @ values[:, :, :end]
            mixed = mixed.view(rows, self._heads, length, self._size).transpose(1, 2).reshape(rows, length, -1)
            x = x + attention.o_proj(mixed)
            y, mlp = layer.post_attention_layernorm(x), layer.mlp
            x = x + mlp.down_proj(functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        normed: Tensor = self._inner.norm(x)
        return normed


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
