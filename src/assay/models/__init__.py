"""The models that pairs train: a text-to-image diffusion transformer and a GPT."""
