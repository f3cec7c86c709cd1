"""Trainings that differ in one thing, and how their weights part."""
