# SPDX-License-Identifier: Apache-2.0
"""Pipelines of Stable Diffusion 3 and FLUX with random weights, of every part that real ones have.

A transformer, a VAE, CLIP towers (two, or one) and a T5 tower, their tokenizers and the scheduler, saved as
diffusers saves a pipeline; 0.4 M parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from recipe.async_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BEGIN, END = "<pad>", "<begin>", "<end>"
MAX_TOKENS = 6
"""The longest prompt: four words, a beginning and an end."""
CHAT_TEMPLATE = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"


@dataclass(frozen=True, kw_only=True)
class ImageModelSpec:
    """Shape of a pipeline of Stable Diffusion 3."""

    family: ClassVar[str] = "sd3"

    num_layers: int = 2
    """Blocks of the transformer."""

    num_heads: int = 4
    """Attention heads of the transformer, each 16 wide."""

    text_size: int = 32
    """Width of each CLIP tower; T5 is twice as wide."""

    latent_channels: int = 4
    """Channels of a latent, which has half the height and width of its picture."""

    vae_channels: tuple[int, int] = (8, 16)
    """Channels of the VAE's two levels."""

    side: int = 16
    """Height and width of a picture, in pixels."""

    def __post_init__(self) -> None:
        if self.side < 4 or self.side % 4:
            raise ConfigError(f"model side must be a multiple of 4 pixels, got {self.side}")

    def pipeline(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """Build the pipeline with weights from torch's random state."""
        from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

        transformer, vae = _sd3(self), _vae(self)
        return StableDiffusion3Pipeline(
            transformer=transformer,
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=_projecting_clip(self, tokenizer),
            text_encoder_2=_projecting_clip(self, tokenizer),
            text_encoder_3=_t5(self, tokenizer),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            tokenizer_3=tokenizer,
        )


@dataclass(frozen=True, kw_only=True)
class FluxModelSpec(ImageModelSpec):
    """Shape of a pipeline of FLUX.1: guidance is an input, and the shift follows from the image's size."""

    family: ClassVar[str] = "flux"

    num_single_layers: int = 2
    """Blocks that see text and image as one sequence, after the `num_layers` that do not."""

    def pipeline(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """Build the pipeline with weights from torch's random state."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        transformer, vae = _flux(self), _vae(self)
        return FluxPipeline(
            transformer=transformer,
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
            ),
            text_encoder=_clip(self, tokenizer),
            text_encoder_2=_t5(self, tokenizer),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
        )


def make_pipeline(spec: ImageModelSpec, words: Sequence[str], seed: int) -> Any:
    """Build the pipeline with weights drawn from `seed`; the caller's random state is preserved."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return spec.pipeline(make_word_tokenizer(words))


def make_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer of whole words. verl needs a chat template: the bare content of the message."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate((PAD, BEGIN, *words, END))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(token, vocabulary[token]) for token in (BEGIN, END)]
    backend.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _sd3(spec: ImageModelSpec) -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=spec.side // 2,
        patch_size=2,
        in_channels=spec.latent_channels,
        out_channels=spec.latent_channels,
        num_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        attention_head_dim=16,
        joint_attention_dim=2 * spec.text_size,
        caption_projection_dim=16 * spec.num_heads,
        pooled_projection_dim=2 * spec.text_size,
        pos_embed_max_size=spec.side // 2,
    )


def _flux(spec: FluxModelSpec) -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4 * spec.latent_channels,  # patches of 2 x 2
        num_layers=spec.num_layers,
        num_single_layers=spec.num_single_layers,
        num_attention_heads=spec.num_heads,
        attention_head_dim=16,
        joint_attention_dim=2 * spec.text_size,
        pooled_projection_dim=spec.text_size,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )


def _vae(spec: ImageModelSpec) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=spec.vae_channels,
        layers_per_block=1,
        latent_channels=spec.latent_channels,
        norm_num_groups=4,
        sample_size=spec.side,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _projecting_clip(spec: ImageModelSpec, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(_clip_config(spec, tokenizer))


def _clip(spec: ImageModelSpec, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import CLIPTextModel

    return CLIPTextModel(_clip_config(spec, tokenizer))


def _clip_config(spec: ImageModelSpec, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.text_size,
        projection_dim=spec.text_size,
        intermediate_size=2 * spec.text_size,
        num_hidden_layers=2,  # diffusers takes the states before the last layer
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _t5(spec: ImageModelSpec, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=2 * spec.text_size,
        d_kv=16,
        d_ff=2 * spec.text_size,
        num_layers=1,
        num_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5EncoderModel(config)
