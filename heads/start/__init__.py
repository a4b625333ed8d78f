"""Where fresh heads start. `closed_form` first: linear maps by ridge regression, logits no louder than even guessing.
`eagle3` and `block`: whole layers of these families; `copying`: attention heads that copy earlier text.
"""
