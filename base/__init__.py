"""What all rooms stand on: user-visible errors (`errors`), files written whole or not at all (`files`, `owned`,
`jsonl`), what differs between settings (`differing`), child processes (`children`), ending on Ctrl-C (`ending`), the
console (`terminal`) and the types of JSON that others wrote (`typed`).
"""
