"""Training: data, losses, one loop, and the recipes for target and draft models."""
