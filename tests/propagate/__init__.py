"""Tests of the factor rules and what is built on them."""
