# SPDX-License-Identifier: Apache-2.0
"""The policy: a Qwen2.5-VL or Qwen3-VL with random weights, its tokenizer, and a real image processor.

A picture has one token for each two by two patches, of 14 pixels or, after it was enlarged, of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from recipe.async_pipeline.lab.tasks.model import ModelSpec
from recipe.async_pipeline.lab.tasks.tokenizer import VOCAB_SIZE, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

VisionFamily = Literal["qwen2.5-vl", "qwen3-vl"]
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

    family: VisionFamily = "qwen2.5-vl"
    vision: VisionSpec = field(default_factory=VisionSpec)


def make_processor(family: VisionFamily = "qwen2.5-vl") -> ProcessorMixin:
    """Return the tokenizer with the tokens of pictures, and the processor of images around it."""
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    new = family == "qwen3-vl"
    patch = 16 if new else 14
    images = Qwen2VLImageProcessor(
        patch_size=patch, min_pixels=(2 * patch) ** 2, max_pixels=16 * (2 * patch) ** 2
    )
    made: ProcessorMixin = (Qwen3VLProcessor if new else Qwen2_5_VLProcessor)(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor() if new else Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )
    return made


def make_look_model(spec: LookModelSpec, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Build the fp32 policy with weights drawn from `seed`; the caller's random state is preserved."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    new = spec.family == "qwen3-vl"
    num_heads = spec.hidden_size // spec.head_dim
    half = spec.head_dim // 2
    # Of the rotary pairs of a head: time, height and width.
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
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
        "rope_parameters": rotary,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision: dict[str, Any] = {
        "depth": spec.vision.depth,
        "hidden_size": spec.vision.hidden_size,
        "num_heads": spec.vision.num_heads,
        "intermediate_size": spec.vision.intermediate_size,
        "out_hidden_size": spec.hidden_size,
        "initializer_range": spec.init_std,
    }
    if new:
        # vLLM 0.28 asks for the architecture of the language model alone, on a CPU.
        text |= {"head_dim": spec.head_dim, "architectures": ["Qwen3ForCausalLM"]}
        rotary["mrope_interleaved"] = True
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16 * 16}
    else:
        vision["fullatt_block_indexes"] = [spec.vision.depth - 1]
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    config = (Qwen3VLConfig if new else Qwen2_5_VLConfig)(
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
        model: PreTrainedModel = (
            Qwen3VLForConditionalGeneration if new else Qwen2_5_VLForConditionalGeneration
        )(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.float()
