"""What serves a trained head. `heads` loads a head from any folder, ours or an engine's; `export` writes one for an
engine and `check` says what is wrong with a folder. `vllm`, `sglang` and `llamacpp` have what each engine is told,
`families/` what the folders of each family hold, `layouts/` what these files share.
"""
