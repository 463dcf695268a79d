"""Architectures of Hugging Face's transformers, built small from their configurations: nothing is downloaded."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch import nn

from fidelity import drawn
from fidelity.drawn import LENGTH, SIDE, WORDS, Settings
from fidelity.subjects import Subject

TEXT: Settings = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Settings = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
BOTH_SIDES: Settings = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
IMAGE: Settings = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}
STAGES: Settings = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "image_size": SIDE}
SOUND: Settings = {
    **TEXT,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,  # its masks come from NumPy's random numbers
}


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    transformers.logging.set_verbosity(logging.ERROR)  # it has remarks on small models
    yield from _encoders()
    yield from _decoders()
    yield from _text_to_text()
    yield from _images()
    yield from _sounds()
    yield from _several()
    yield from _otherwise()


def _encoders() -> Iterator[Subject]:
    of = partial(_subject, "encoders")
    yield of("BertForMaskedLM", TEXT, drawn.words)
    yield of("RobertaForSequenceClassification", TEXT, drawn.sentences)
    yield of("DistilBertForQuestionAnswering", {**TEXT, "hidden_dim": 64}, drawn.spans)
    yield of("AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, drawn.words)  # one layer, called twice
    yield of("ElectraForPreTraining", {**TEXT, "embedding_size": 16}, drawn.fakes)
    yield of("DebertaV2ForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, drawn.words)
    yield of("ModernBertForMaskedLM", {**TEXT, "cls_token_id": 1, "sep_token_id": 2}, drawn.words)
    xlnet = {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    yield of("XLNetLMHeadModel", xlnet, drawn.words)
    yield of("FNetForMaskedLM", TEXT, drawn.words)  # complex numbers
    yield of("LongformerForMaskedLM", {**TEXT, "attention_window": [4, 4]}, drawn.words)
    yield of("BigBirdForMaskedLM", {**TEXT, "attention_type": "original_full"}, drawn.words)
    funnel = {"vocab_size": WORDS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]}
    yield of("FunnelForMaskedLM", funnel, drawn.words)
    yield of("ConvBertForMaskedLM", {**TEXT, "embedding_size": 32}, drawn.words)


def _decoders() -> Iterator[Subject]:
    of = partial(_subject, "decoders")
    for name in ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTJForCausalLM", "BloomForCausalLM", "PhiForCausalLM"):
        yield of(name, {**TEXT, "rotary_dim": 4}, drawn.prompt)
    yield of("OPTForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 16}, drawn.prompt)
    yield of("FalconForCausalLM", {**TEXT, "num_kv_heads": 2, "new_decoder_architecture": True}, drawn.prompt)
    grouped = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Cohere")
    for name in grouped:
        yield of(f"{name}ForCausalLM", GROUPED, drawn.prompt)
    yield of("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, drawn.prompt)
    yield of("Qwen2MoeForCausalLM", {**GROUPED, "num_experts": 4, "moe_intermediate_size": 16}, drawn.prompt)
    yield of("GptOssForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, drawn.prompt)
    yield of("MambaForCausalLM", {**TEXT, "state_size": 8}, drawn.prompt)
    yield of("Mamba2ForCausalLM", {**TEXT, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}, drawn.prompt)
    yield of("RwkvForCausalLM", {**TEXT, "attention_hidden_size": 32}, drawn.prompt)
    yield of("RecurrentGemmaForCausalLM", {**GROUPED, "lru_width": 32, "num_hidden_layers": 3}, drawn.prompt)


def _text_to_text() -> Iterator[Subject]:
    of = partial(_subject, "text to text")
    for name in ("BartForConditionalGeneration", "PegasusForConditionalGeneration", "MarianMTModel"):
        yield of(name, BOTH_SIDES, drawn.prompt)
    t5 = {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    yield of("T5ForConditionalGeneration", t5, drawn.prompt)
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    yield of("SwitchTransformersForConditionalGeneration", {**t5, **experts}, drawn.prompt)


def _images() -> Iterator[Subject]:
    of = partial(_subject, "vision")
    yield of("ViTForImageClassification", IMAGE, drawn.labelled)
    yield of("DeiTForImageClassification", IMAGE, drawn.labelled)
    yield of("BeitForImageClassification", {**IMAGE, "use_relative_position_bias": True}, drawn.labelled)
    yield of("Dinov2ForImageClassification", {**IMAGE, "drop_path_rate": 0.2}, drawn.labelled)
    swin = {"image_size": SIDE, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
    yield of("SwinForImageClassification", swin, drawn.labelled)
    segformer = {"num_encoder_blocks": 2, "num_attention_heads": [1, 2], "decoder_hidden_size": 16}
    yield of("SegformerForSemanticSegmentation", {**STAGES, **segformer}, drawn.segmented)
    yield of("ConvNextForImageClassification", STAGES, drawn.labelled)
    yield of("ResNetForImageClassification", {**STAGES, "embedding_size": 16}, drawn.labelled)
    yield of("MobileViTForImageClassification", {**IMAGE, "patch_size": 2, "image_size": 64}, drawn.labelled)
    mae = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
    yield of("ViTMAEForPreTraining", {**IMAGE, **mae, "decoder_intermediate_size": 64}, drawn.pixels)
    yield of("VideoMAEForVideoClassification", {**IMAGE, "num_frames": 4}, drawn.films)
    configuration: Any = transformers.ResNetConfig
    backbone = configuration(**STAGES, embedding_size=16, out_features=["stage2"])
    detr = {**BOTH_SIDES, "backbone_config": backbone, "use_timm_backbone": False, "num_queries": 5}
    yield of("DetrForObjectDetection", detr, drawn.pixels)


def _sounds() -> Iterator[Subject]:
    of = partial(_subject, "audio")
    yield of("Wav2Vec2ForCTC", SOUND, drawn.waves)  # a weight norm as a parametrization
    yield of("HubertForCTC", SOUND, drawn.waves)
    listening = {"num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": LENGTH}
    yield of("WhisperForConditionalGeneration", {**BOTH_SIDES, **listening}, drawn.mels)


def _several() -> Iterator[Subject]:
    of = partial(_subject, "multimodal")
    parts = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}
    yield of("CLIPModel", parts, drawn.pairs)
    yield of("SiglipModel", parts, drawn.pairs)
    blip = {**parts, "text_config": {**TEXT, "encoder_hidden_size": 32}, "image_text_hidden_size": 16}
    yield of("BlipForConditionalGeneration", blip, drawn.captions)
    yield of("ViltModel", {**IMAGE, **TEXT}, drawn.pictures_with_words)
    perceiver = {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4}
    reading = {"num_cross_attention_heads": 4, "max_position_embeddings": LENGTH}
    yield of("PerceiverForMaskedLM", {**TEXT, "d_model": 32, **perceiver, **reading}, drawn.blanks)


def _otherwise() -> Iterator[Subject]:
    """Yield models that also stand above, run in another way."""
    of = partial(_subject, "variants")
    yield of("BertForMaskedLM", TEXT, drawn.words, title="in eager attention", attn_implementation="eager")
    yield of("LlamaForCausalLM", GROUPED, drawn.prompt, title="in bfloat16", dtype=torch.bfloat16)
    for reentrant in (False, True):
        title = f"checkpointed, reentrant {reentrant}"
        yield of("GPT2LMHeadModel", TEXT, drawn.prompt, title=title, reentrant=reentrant)


def _subject(
    kind: str,
    name: str,
    settings: Settings,
    inputs: Callable[[], Settings],
    *,
    title: str = "",
    reentrant: bool | None = None,
    **how: Any,
) -> Subject:
    def build() -> nn.Module:
        chosen: Any = getattr(transformers, name)
        model = chosen._from_config(chosen.config_class(**settings), **how)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return cast(nn.Module, model)

    return Subject(
        name=f"{name}, {title}" if title else name,
        kind=f"transformers {kind}",
        build=build,
        inputs=lambda: ((), dict(inputs())),
    )
