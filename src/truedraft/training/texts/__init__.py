"""Training data: texts and a tokenizer, prompts cut from texts, and a target's answers to them."""
