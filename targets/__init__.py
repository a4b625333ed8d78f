"""The frozen model. `target` first, then `loading` (from disk or the hub), `frozen_model` (where its parts are) and
`check` (whether our reading of them is the model's). `weights/` has its files, `chat/` its chat template, `layers/`
what differs between models, `caches/` and `cpu/` how it decodes.
"""
