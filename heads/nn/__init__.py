"""What targets and heads compute with: `layers` (parts of a Llama layer), `cache` and `attention` for decoding, with
`split_attention` for long caches; `decoder_layer`, a layer of any target by itself; `chain_attention` and `fusing`
for training; `documents` keeps packed texts apart; `cpu_decoder` and `cpu_kernels` decode in bf16 on a CPU,
`joined_decoder` on a GPU.
"""
