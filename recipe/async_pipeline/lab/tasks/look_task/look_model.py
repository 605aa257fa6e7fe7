# SPDX-License-Identifier: Apache-2.0
"""The policy: a Qwen2.5-VL with random weights, its tokenizer, and a real image processor.

A picture has one token for each two by two patches of 14 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.lab.tasks.model import ModelSpec
from recipe.async_pipeline.lab.tasks.tokenizer import VOCAB_SIZE, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, VIDEO)

# As in `tokenizer`: the bare content of the user's message, and Qwen's end of an assistant turn. A picture is
# written as in the Qwen templates.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Shape of the vision tower."""

    depth: int = 2
    """Blocks; the last one attends over the whole picture."""
    hidden_size: int = 64
    num_heads: int = 2
    intermediate_size: int = 128


@dataclass(frozen=True, kw_only=True)
class LookModelSpec(ModelSpec):
    """Shape of a policy that reads pictures."""

    vision: VisionSpec = field(default_factory=VisionSpec)


def make_processor() -> Qwen2_5_VLProcessor:
    """Return the tokenizer with the tokens of pictures, and the processor of images around it."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=16 * 28 * 28),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def make_look_model(
    spec: LookModelSpec, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Build the fp32 policy with weights drawn from `seed`; the caller's random state is preserved."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    num_heads = spec.hidden_size // spec.head_dim
    half = spec.head_dim // 2
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE + len(VISION_TOKENS),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        # Of the rotary pairs of a head: time, height and width.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": spec.vision.depth,
        "hidden_size": spec.vision.hidden_size,
        "num_heads": spec.vision.num_heads,
        "intermediate_size": spec.vision.intermediate_size,
        "out_hidden_size": spec.hidden_size,
        "fullatt_block_indexes": [spec.vision.depth - 1],
        "initializer_range": spec.init_std,
    }
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=spec.tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.float()
