"""Flash Attention that people use: `flash_attention`, its kernels on CUDA, its path on the CPU."""
