"""Mathematics of speculative decoding: no model, tokenizer, I/O, clock or global random state."""
