"""Recipes: how the models that ship with truedraft were made. They only call the package."""
