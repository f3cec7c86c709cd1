"""Attention: baseline, tiled (Flash Attention re-implemented numerically), golden."""
