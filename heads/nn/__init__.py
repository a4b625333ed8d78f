"""Building blocks of targets and heads: `layers` (parts of a Llama layer); `cache` and `attention` for decoding, with
`split_attention` for long caches; `decoder_layer`, a single layer of any target; `chain_attention` and `fusing` for
training; `documents` separates packed texts; `cpu_decoder` and `cpu_kernels` decode in bf16 on a CPU, `joined_decoder`
on a GPU.
"""
