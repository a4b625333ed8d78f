"""Where fresh heads start. `closed_form` first: linear maps by ridge regression, logits no louder than even guessing.
`eagle3`: EAGLE-3's first layer, `copying`: its attention heads that copy earlier text (a block's: block_start.py).
"""
