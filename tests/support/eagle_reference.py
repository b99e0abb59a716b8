"""EAGLE-3 from the paper's page, slowly, and heads with random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.heads import Eagle3Config, Eagle3Head


def random_eagle(config: Eagle3Config) -> Eagle3Head:
    """Random weights; of a reduced vocabulary every second id, as far as there are."""
    made, generator = Eagle3Head(config), torch.Generator().manual_seed(5)
    for weight in made.parameters():
        weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2, generator=generator)
    if made.draft_ids is not None:
        made.draft_ids.copy_(torch.arange(len(made.draft_ids)) * 2 + 1)
    return made.requires_grad_(False)


class EagleReference:
    """Drafts by the page: no cache, no packing, each path read from the text's beginning.

    Args:
        model: the target, as transformers runs it.
        made: the head.
    """

    def __init__(self, model: PreTrainedModel, made: Eagle3Head) -> None:
        self.model, self.made, self.weights = model, made, made.state_dict()

    def product(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + self.made.config.eps) * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = position / self.made.config.rope["rope_theta"] ** (torch.arange(half) / half)
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Behind a text and drafted tokens, over the target's whole vocabulary."""
        config, known = self.made.config, len(text) - 1
        states = self.model(torch.tensor([text[:known]]), output_hidden_states=True).hidden_states
        table = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        x = torch.zeros(config.width)
        for place, token in enumerate([*text[1:], *path]):
            if place < known:
                chunks = [states[layer + 1][0, place] for layer in config.layers]
                if config.fc_norm:
                    chunks = [self.norm(f"fc_norm.{number}", each) for number, each in enumerate(chunks)]
                together = torch.cat(chunks)
                vector = self.product("fc", self.norm("input_norm", together) if config.norm_before_fc else together)
            else:
                vector = x
            x = self.layer(vector, table[token], place + config.rope_start, keys, values)
        leaving = x if config.norm_output else self.norm("norm", x)
        if not config.own_output:
            return self.model.get_output_embeddings().weight @ leaving
        own = self.product("lm_head", leaving)
        if not config.draft_vocab:
            return own
        whole = torch.full((config.vocab_size,), -torch.inf)
        whole[self.weights["draft_ids"]] = own
        return whole

    def layer(
        self, vector: Tensor, embedded: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        config, name = self.made.config, "midlayer.self_attn."
        normed = self.norm("midlayer.hidden_norm", vector)
        both = torch.cat([self.norm("midlayer.input_layernorm", embedded), normed])
        query = self.product(name + "q_proj", both).view(config.heads, -1)
        key = self.product(name + "k_proj", both).view(config.kv_heads, -1)
        if config.query_norms:
            query = torch.stack([self.norm(name + "q_norm", each) for each in query])
            key = torch.stack([self.norm(name + "k_norm", each) for each in key])
        keys.append(torch.stack([self.turned(each, position) for each in key]))
        values.append(self.product(name + "v_proj", both).view(config.kv_heads, -1))
        mixed = []
        for number in range(config.heads):
            own = self.turned(query[number], position)
            shared = number * config.kv_heads // config.heads
            scores = torch.stack([own @ key[shared] for key in keys]) / math.sqrt(config.head)
            mixed.append(sum(w * value[shared] for w, value in zip(scores.softmax(0), values, strict=True)))
        x = (normed if config.norm_before_residual else vector) + self.product(name + "o_proj", torch.cat(mixed))
        entering = self.norm("midlayer.post_attention_layernorm", x)
        gate, up = (self.product(f"midlayer.mlp.{each}_proj", entering) for each in ("gate", "up"))
        x = x + self.product("midlayer.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        return self.norm("norm", x) if config.norm_output else x
