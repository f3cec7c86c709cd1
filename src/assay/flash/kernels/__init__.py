"""The Triton kernels of `flash_attention`."""
