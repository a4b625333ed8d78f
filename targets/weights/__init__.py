"""The files that a target is stored in: `tensor_files` and `stored` (where each tensor is, fingerprints), `reading`
(tensors into a model on the meta device), `gguf`, `served_adapter` and `mtp_checkpoint` (what stands in or
beside them).
"""
