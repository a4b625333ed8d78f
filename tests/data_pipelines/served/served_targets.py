"""Kinds of targets that a server is asked for."""

KINDS = {  # tied and untied, with and without bias of the queries, keys and values
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}
