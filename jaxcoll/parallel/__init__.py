"""Strategies: how models and their training are spread over a mesh."""
