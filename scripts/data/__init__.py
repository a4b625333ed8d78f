"""The verbs of `headstart data`, one file each; `data_command` puts them together."""
