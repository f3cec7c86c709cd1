"""A running model whose attention is also computed plainly, on the same inputs: how far apart, and is that normal?"""
