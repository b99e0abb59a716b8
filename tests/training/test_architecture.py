"""Building, saving and loading Llama models; the training attention against the stock one."""

from __future__ import annotations

import pytest
import torch

from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama, use_training_attention

SHAPE = LlamaShape(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, intermediate=64, context=512, head_size=8)


@pytest.mark.parametrize("length", [1, 128, 129, 300])
def test_training_attention_equals_stock_attention(length):
    model = new_llama(SHAPE, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(0))
    stock = model(input_ids=ids, use_cache=False).logits
    use_training_attention(model)
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, stock, atol=1e-4)


def test_the_seed_decides_the_weights_and_leaves_global_noise_alone():
    state = torch.get_rng_state()
    one, two, other = new_llama(SHAPE, seed=1), new_llama(SHAPE, seed=1), new_llama(SHAPE, seed=2)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_saved_in_bfloat16_shards_and_loaded_with_tied_weights(tmp_path):
    model = new_llama(SHAPE, seed=1)
    save_llama(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_causal_lm(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))
    save_llama(model, tmp_path)  # no stale shards remain
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
