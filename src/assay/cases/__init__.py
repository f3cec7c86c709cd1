"""Optimizations under test, each with its baseline, variants, inputs and golden value."""
