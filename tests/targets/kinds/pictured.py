"""Tiny targets that read pictures, each in a folder with its processor; and rows with pictures."""

import base64
import io
from pathlib import Path
from typing import Any

import transformers
from kind import VOCAB_SIZE, Kind
from safetensors.torch import load_file, save_file
from words import word_tokenizer
from wrappers import WRAPPERS

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    " {% endfor %}{% endif %} end\n{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
SMALL: dict[str, Any] = {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}}
QWEN_PIXELS: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 8 * 28 * 28, "patch_size": 14}
# by the name of a kind: names of its special tokens from 500 on, and its processor with a tokenizer
QWEN_TOKENS = "<|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|>"


GEMMA4 = {
    "image_token": 500,
    "boi_token": 501,
    "eoi_token": 502,
    "audio_token": 503,
    "boa_token": 504,
    "eoa_token": 505,
}


def llava(tokenizer: Any) -> Any:
    image = transformers.CLIPImageProcessor(**SMALL)
    how: dict[str, Any] = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    return transformers.LlavaProcessor(image, tokenizer, **how, num_additional_image_tokens=1)


def qwen(name: str) -> Any:
    def processor(tokenizer: Any) -> Any:
        image = transformers.Qwen2VLImageProcessor(**QWEN_PIXELS)
        video = getattr(transformers, name.replace("2_5_VLP", "2VLP").replace("Processor", "VideoProcessor"))()
        return getattr(transformers, name)(image, tokenizer, video)

    return processor


def gemma4(tokenizer: Any) -> Any:
    image = transformers.Gemma4ImageProcessor(patch_size=14, max_soft_tokens=70, pooling_kernel_size=3)
    sound, video = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4VideoProcessor()
    return transformers.Gemma4Processor(sound, image, tokenizer, video, image_seq_length=4)


PROCESSORS: dict[str, tuple[str, str, Any]] = {
    "llava": ("<image>", "<image>", llava),
    "qwen2_5_vl": (QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>", qwen("Qwen2_5_VLProcessor")),
    "gemma4_full": (
        "<|image|> <boi> <eoi> <|audio|> <boa> <eoa> <|video|>",
        "<|image|>",
        gemma4,
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_5_full", "qwen3_5_moe_full"),
        (QWEN_TOKENS, "<|vision_start|><|image_pad|><|vision_end|>", qwen("Qwen3VLProcessor")),
    ),
}


def image_target(name: str, folder: Path, kind: Kind | None = None) -> Path:
    """The folder of a tiny target of that kind. Args: kind: of other sizes than `WRAPPERS` has."""
    special, shown, processor = PROCESSORS[name]
    model = (kind or WRAPPERS[name]).model()
    output: Any = model.get_output_embeddings()
    output.weight.data[500:] = 0  # or it would write image tokens, as none that is trained does
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    own = "vision_tower.vision_model." if name == "llava" else "vision_tower."  # as LLaVA's are on the hub
    stored = {key.replace("vision_tower.", own): weight for key, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    names = [f"w{i}" for i in range(VOCAB_SIZE)]
    names[1:5] = ["begin", "end", "user", "assistant"]
    names[500 : 500 + len(special.split())] = special.split()
    shown_by = {key: names[id] for key, id in GEMMA4.items()} if name == "gemma4_full" else None
    extra = {"extra_special_tokens": shown_by} if shown_by else {}
    special_words = ["end", *special.split()]
    tokenizer = word_tokenizer(names, bos_token="begin", additional_special_tokens=special_words, **extra)
    tokenizer.add_tokens(names)  # for Qwen3.5 transformers takes a tokenizer of bytes, which keeps none but these
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", shown)
    processor(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(number: int, *, width: int = 60, height: int = 44) -> bytes:
    """A PNG of smooth colours, another one for each number."""
    from PIL import Image

    image = Image.new("RGB", (width, height))
    pixels = [
        ((x * (3 + number)) % 256, (y * (5 + 2 * number)) % 256, (37 * number + x * y) % 256)
        for y in range(height)
        for x in range(width)
    ]
    image.putdata(pixels)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def image_rows(folder: Path, num_rows: int) -> list[dict[str, Any]]:
    """Rows of one to three questions' words, with one or two pictures each, given in all known forms."""
    rows = []
    for number in range(num_rows):
        data = picture(number, width=40 + 9 * (number % 5), height=36 + 11 * (number % 3))
        (folder / f"{number}.png").write_bytes(data)
        code = base64.b64encode(data).decode()
        forms: list[dict[str, Any]] = [
            {"type": "image", "image": f"{number}.png"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{code}"}},
            {"type": "image", "image": code},
            {"type": "image"},
        ]
        text = " ".join(f"w{6 + (7 * number + 11 * i) % 480}" for i in range(3 + number % 6))
        parts = [forms[number % 4], {"type": "text", "text": text}]
        if number % 5 == 0:
            parts.append({"type": "image", "image": str(folder / "0.png")})
        row: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
        rows.append(row | ({"images": [{"bytes": code, "path": None}]} if number % 4 == 3 else {}))
    return rows
