"""Mixture of experts: routers, Flax layers, an expert-parallel executor. Not there yet; see docs/design.md, section 5.

One-hot mixtures that users write themselves are planned like any other program.
"""
