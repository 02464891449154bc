"""One file per kernel: reference, bytes and flops, Triton kernel, wrapper, configurations."""
