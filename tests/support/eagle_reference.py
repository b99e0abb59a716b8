"""EAGLE-3 from the paper's page, slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from support.layer_heads import Page, random_head
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head


def random_eagle(config: Eagle3Config, kind: type[Eagle3Head] = Eagle3Head) -> Eagle3Head:
    return random_head(kind, config)


class EagleReference(Page):
    """Drafts by the page: no cache, no packing, each path read from the text's beginning.

    Args:
        model: the target, as transformers runs it.
        made: the head.
    """

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
            number_of_layer = int(layer.removeprefix("layers.")) if layer != "midlayer" else 0
            seen = [each for each in range(len(keys)) if self.sees(number_of_layer, len(keys) - 1, each)]
            scores = torch.stack([own @ keys[each][shared] for each in seen]) / math.sqrt(config.head)
            mixed.append(sum(w * values[each][shared] for w, each in zip(scores.softmax(0), seen, strict=True)))
        x = x + self.product(name + "o_proj", torch.cat(mixed))
        inner = self.norm(f"{layer}.post_attention_layernorm", x)
        return x + self.mlp(layer, inner)


class PEagleReference(EagleReference):
    """P-EAGLE by the page (arXiv 2602.01469): the known pairs, and masks behind the last."""

    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Behind a text and drafted tokens, which it does not see."""
        return self.ahead(text, len(path) + 1)[-1]

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
