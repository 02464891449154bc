"""The live body: real paged KV and real kernels, driven by the same core as the simulator."""
