"""Are the kernels right and fast on this GPU? See __main__.py."""
