"""A target that finds its text hard: English prose, for measuring what heads bring where probabilities are flat."""
