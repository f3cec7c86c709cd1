"""Sweeps: a case over a grid of plans, shapes, inputs and seeds; each point is one Record."""
