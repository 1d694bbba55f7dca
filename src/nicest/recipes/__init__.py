"""Recipes: one TOML file for each column of the paper's table in both readings, and our own."""

from nicest.recipes.recipe import Recipe, load_recipe, names, parse

__all__ = ["Recipe", "load_recipe", "names", "parse"]
