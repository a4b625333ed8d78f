"""Engines that serve, by the name that the command line takes."""

from .address import Address
from .engine import OpenAIEngine, ServerEngine
from .llama_server import LlamaServerEngine
from .sglang import SglangEngine
from .vllm import VllmEngine

SERVER_ENGINES: dict[str, ServerEngine] = {
    one.name: one for one in (VllmEngine(), SglangEngine(), LlamaServerEngine(), OpenAIEngine())
}


def engine_at(address: Address) -> ServerEngine:
    """Returns the engine that serves at an address, told by what it counts, llama-server by its properties. Raises
    BadInput if nothing answers there."""
    told, properties = address.read("/metrics") or "", address.json("/props")
    if isinstance(properties, dict) and "default_generation_settings" in properties:
        return SERVER_ENGINES["llama-server"]
    return next((one for name, one in SERVER_ENGINES.items() if f"{name}:" in told), SERVER_ENGINES["openai"])
