"""Drafters with heads on the target's own vectors: `base` is what they share, `guess_trees` and `beams` their trees."""
