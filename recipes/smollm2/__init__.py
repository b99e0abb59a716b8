"""Drafters for SmolLM2-135M-Instruct: prompts, the model's own answers to them, a draft model and heads."""
