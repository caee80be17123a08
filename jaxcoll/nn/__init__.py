"""Layers for Flax linen and NNX whose weights are split over the ranks of a mesh axis."""
