"""How engines load the heads of each family: names, contract, writing and reading, a file a family.
`table` lists them.
"""
