"""What is learned from: texts and a tokenizer, prompts cut from texts, and what a target wrote after them."""
