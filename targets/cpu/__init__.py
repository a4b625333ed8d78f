"""Whole decoders: `joined_decoder` with fewer operations, and layers in bf16 on a CPU, by kernels of our own for its
instruction set. `kernels.cpp` is the arithmetic, over the vectors of one header for each set; `structs` is what it
shares with Python. `build` picks the set and compiles; `products` are single matrix products and norms, `parts` what a
layer is made of and `agreement` how it computes, `decoder` whole layers, `chains` greedy drafts in one call.
"""
