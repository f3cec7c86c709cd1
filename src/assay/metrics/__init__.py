"""What separates two tensors, and two sets of weights."""
