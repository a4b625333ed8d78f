"""Layers of Llama-shaped targets and of heads in bf16 on a CPU, by kernels of our own for its instruction set.

`kernels.cpp` is the arithmetic, over the vectors of one header for each instruction set; `structs` is what it shares
with Python. `build` picks the set and compiles; `products` are single matrix products and norms, `decoder` whole
layers, `chains` greedy drafts in one call.
"""
