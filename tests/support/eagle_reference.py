"""EAGLE-3 from the paper's page, slowly, and heads with random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.heads import Eagle3Config, Eagle3Head


def random_eagle(config: Eagle3Config, kind: type[Eagle3Head] = Eagle3Head) -> Eagle3Head:
    """Random weights; of a reduced vocabulary every second id, as far as there are."""
    made, generator = kind(config), torch.Generator().manual_seed(5)
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
        return self.whole(self.product("lm_head", leaving))

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the head over the target's whole vocabulary."""
        if not self.made.config.draft_vocab:
            return logits
        found = torch.full((self.made.config.vocab_size,), -torch.inf)
        found[self.weights["draft_ids"]] = logits
        return found

    def layer(
        self, vector: Tensor, embedded: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        normed = self.norm("midlayer.hidden_norm", vector)
        both = torch.cat([self.norm("midlayer.input_layernorm", embedded), normed])
        x = normed if self.made.config.norm_before_residual else vector
        x = self.block("midlayer", x, both, position, keys, values)
        return self.norm("norm", x) if self.made.config.norm_output else x

    def block(
        self, layer: str, x: Tensor, entering: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The residual stream behind a layer, of that before it and what its attention reads."""
        config, name = self.made.config, f"{layer}.self_attn."
        query = self.product(name + "q_proj", entering).view(config.heads, -1)
        key = self.product(name + "k_proj", entering).view(config.kv_heads, -1)
        if config.query_norms:
            query = torch.stack([self.norm(name + "q_norm", each) for each in query])
            key = torch.stack([self.norm(name + "k_norm", each) for each in key])
        keys.append(torch.stack([self.turned(each, position) for each in key]))
        values.append(self.product(name + "v_proj", entering).view(config.kv_heads, -1))
        mixed = []
        for number in range(config.heads):
            own = self.turned(query[number], position)
            shared = number * config.kv_heads // config.heads
            scores = torch.stack([own @ key[shared] for key in keys]) / math.sqrt(config.head)
            mixed.append(sum(w * value[shared] for w, value in zip(scores.softmax(0), values, strict=True)))
        x = x + self.product(name + "o_proj", torch.cat(mixed))
        inner = self.norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (self.product(f"{layer}.mlp.{each}_proj", inner) for each in ("gate", "up"))
        return x + self.product(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)


class PEagleReference(EagleReference):
    """P-EAGLE by the page (arXiv 2602.01469): the known pairs, and masks behind the last."""

    def ahead(self, text: Sequence[int], depth: int) -> list[Tensor]:
        """Logits of as many tokens behind a text, over the target's whole vocabulary."""
        config, known = self.made.config, len(text) - 1
        states = self.model(torch.tensor([text[:known]]), output_hidden_states=True).hidden_states
        table = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        taken = [torch.cat([states[layer + 1][0, place] for layer in config.layers]) for place in range(known)]
        taken += [self.weights["mask_hidden"][0, 0]] * (depth - 1)
        tokens = [*text[1:], *[config.mask_token] * (depth - 1)]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        rows = [
            self.layer(self.product("fc", vector), table[token], place, keys, values)
            for place, (vector, token) in enumerate(zip(taken, tokens, strict=True))
        ]
        for number in range(1, 1 + config.more_layers):
            name, keys, values = f"layers.{number}", [], []
            normed = [self.norm(f"{name}.input_layernorm", x) for x in rows]
            pairs = enumerate(zip(rows, normed, strict=True))
            rows = [self.block(name, x, entering, place, keys, values) for place, (x, entering) in pairs]
        return [self.whole(self.product("lm_head", self.norm("norm", x))) for x in rows[-depth:]]
