"""Servers that decode: `process` starts one and ends it, `address` is one that runs, `asking` puts many questions to it
and notes when each token comes; `engine` is what differs between engines, which are a file each and a line in
`registry`; `setting` is what a command or a config says of all this.
"""
