"""The sampling settings with which a server leaves the target's distribution as it is.

Where a request is silent, vLLM and SGLang apply those of the model's generation_config.json, and llama-server its own
or those of the GGUF file. So all of them are sent.
"""

from typing import Any

LLAMA_SERVER: dict[str, Any] = {
    "top_k": 0,  # as it reports what is off
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
}
# of a chat completion, for any of these servers; each ignores what it does not know
NEUTRAL: dict[str, Any] = {**LLAMA_SERVER, "top_k": -1, "repetition_penalty": 1.0}
