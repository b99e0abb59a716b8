"""Drafters for SmolLM2-135M-Instruct. Their folders lie beside this file; truedraft finds them by the entry point."""
