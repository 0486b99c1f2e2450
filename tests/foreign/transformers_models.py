"""Flax architectures of `transformers`, tiny, with random weights, each with the loss it is usually trained with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.foreign.step import (
    BATCH,
    CLASSES,
    IMAGE,
    SEQUENCE,
    VOCAB,
    Training,
    cross_entropy,
    float_type,
    floats,
    padded,
    random_like,
    tokens,
    training,
)

Inputs = Callable[[], dict[str, np.ndarray]]
Objective = Callable[[Any, Any, dict[str, Any]], Any]


def text(length: int = SEQUENCE) -> dict[str, np.ndarray]:
    return {
        "input_ids": tokens(BATCH, length),
        "attention_mask": padded(BATCH, length),
        "labels": tokens(BATCH, length),
    }


def pair(length: int = SEQUENCE) -> dict[str, np.ndarray]:
    return text(length) | {"decoder_input_ids": tokens(BATCH, 8), "labels": tokens(BATCH, 8)}


def image() -> dict[str, np.ndarray]:
    return {"pixel_values": floats(BATCH, 3, IMAGE, IMAGE), "labels": tokens(BATCH, high=CLASSES, low=0)}


def image_and_text() -> dict[str, np.ndarray]:
    return {key: x for key, x in (image() | text()).items() if key != "labels"}


def spectrogram() -> dict[str, np.ndarray]:
    return {
        "input_features": floats(BATCH, 8, 2 * SEQUENCE),
        "decoder_input_ids": tokens(BATCH, 8),
        "labels": tokens(BATCH, 8),
    }


def sound() -> dict[str, np.ndarray]:
    return {
        "input_values": floats(BATCH, 320),
        "attention_mask": np.ones((BATCH, 320), np.int32),
        "labels": tokens(BATCH, 4),
    }


def classify(model: Any, outputs: Any, batch: dict[str, Any]) -> Any:
    return cross_entropy(outputs.logits, batch["labels"])


def contrast(model: Any, outputs: Any, batch: dict[str, Any]) -> Any:
    """CLIP's loss over all pairs of a batch."""
    right = jnp.arange(outputs.logits_per_image.shape[0])
    return (cross_entropy(outputs.logits_per_image, right) + cross_entropy(outputs.logits_per_text, right)) / 2


def align(model: Any, outputs: Any, batch: dict[str, Any]) -> Any:
    """CTC without padding."""
    logits, labels = outputs.logits, batch["labels"]
    return optax.ctc_loss(
        logits, jnp.zeros(logits.shape[:2], logits.dtype), labels, jnp.zeros(labels.shape, logits.dtype)
    ).mean()


def detect(model: Any, outputs: Any, batch: dict[str, Any]) -> Any:
    """ELECTRA's pretraining: was each token replaced?"""
    return optax.sigmoid_binary_cross_entropy(outputs.logits, batch["labels"] % 2).mean()


def pretrain(model: Any, outputs: Any, batch: dict[str, Any]) -> Any:
    """Masked words and next sentence."""
    head = outputs.get("seq_relationship_logits", outputs.get("sop_logits"))
    return cross_entropy(outputs.prediction_logits, batch["labels"]) + cross_entropy(head, batch["labels"][:, 0] % 2)


@contextlib.contextmanager
def older_clip() -> Iterator[None]:
    """`jnp.clip` with argument names that JAX dropped and T5 still uses."""
    newer = jnp.clip

    def clip(x: Any, *args: Any, a_min: Any = None, a_max: Any = None, **kwargs: Any) -> Any:
        return newer(x, *args, **kwargs) if a_min is None and a_max is None else newer(x, a_min, a_max)

    jnp.clip = clip
    try:
        yield
    finally:
        jnp.clip = newer


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model class, its configuration class and what differs from the defaults of the configuration."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Inputs = text
    objective: Objective = classify

    def build(self) -> Training:
        """The model under the float type that is switched on."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        with older_clip():
            model = getattr(transformers, self.model)(config, dtype=float_type(), _do_init=False, **self._shape())
            init = functools.partial(model.init_weights, input_shape=model.input_shape)
            variables = random_like(jax.eval_shape(init, jax.random.key(0)))
        stateful = "batch_stats" in variables
        params = variables["params"] if stateful else variables
        extra = {"batch_stats": variables["batch_stats"]} if stateful else {}

        def loss(params: Any, extra: Any, batch: dict[str, Any], key: Any) -> tuple[Any, Any]:
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            if stateful:
                outputs, new = model(**inputs, params={"params": params, **extra}, train=True)
                return self.objective(model, outputs, batch), dict(new)
            accepted = inspect.signature(model.__call__).parameters
            mode = {"train": True} if "train" in accepted else {"deterministic": False}
            keys = {name: key for name in ("dropout_rng", "indices_rng") if name in accepted}
            with older_clip():
                outputs = model(**inputs, params=params, **keys, **mode)
            return self.objective(model, outputs, batch), extra

        return training(loss, params, self.inputs(), extra)

    def _shape(self) -> dict[str, Any]:
        """`input_shape` where the default one does not fit a tiny model."""
        if self.inputs is spectrogram:
            return {"input_shape": (1, 8, 2 * SEQUENCE)}
        return {}


_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
_LLAMA = _BERT | {"num_key_value_heads": 2, "head_dim": 8}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": CLASSES,
}
_CNN = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
_CLIP_TEXT = {key: x for key, x in _BERT.items() if key != "max_position_embeddings"} | {
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture("FlaxGPT2LMHeadModel", "GPT2Config", _GPT),
    "bert": Architecture("FlaxBertForPreTraining", "BertConfig", _BERT, objective=pretrain),
    "llama": Architecture("FlaxLlamaForCausalLM", "LlamaConfig", _LLAMA),
    "gemma": Architecture("FlaxGemmaForCausalLM", "GemmaConfig", _LLAMA | {"hidden_act": "gelu"}),
    "gptj": Architecture("FlaxGPTJForCausalLM", "GPTJConfig", _GPT | {"rotary_dim": 4, "resid_pdrop": 0.1}),
    "gpt-neo": Architecture(
        "FlaxGPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": 32,
            "resid_dropout": 0.1,
            "attention_dropout": 0.1,
        },
    ),
    "vit": Architecture("FlaxViTForImageClassification", "ViTConfig", _VIT | {"hidden_dropout_prob": 0.1}, image),
    "beit": Architecture(
        "FlaxBeitForImageClassification",
        "BeitConfig",
        _VIT | {"use_relative_position_bias": True, "layer_scale_init_value": 0.1},
        image,
    ),
    "resnet": Architecture("FlaxResNetForImageClassification", "ResNetConfig", _CNN, image),
    "clip": Architecture(
        "FlaxCLIPModel",
        "CLIPConfig",
        {"text_config": _CLIP_TEXT, "vision_config": _VIT, "projection_dim": 32},
        image_and_text,
        contrast,
    ),
    "roberta": Architecture("FlaxRobertaForMaskedLM", "RobertaConfig", _BERT),
    "bart": Architecture("FlaxBartForConditionalGeneration", "BartConfig", _BART, pair),
    "electra": Architecture(
        "FlaxElectraForPreTraining", "ElectraConfig", _BERT | {"embedding_size": 16}, objective=detect
    ),
    "albert": Architecture(
        "FlaxAlbertForPreTraining", "AlbertConfig", _BERT | {"embedding_size": 16}, objective=pretrain
    ),
    "t5": Architecture("FlaxT5ForConditionalGeneration", "T5Config", _T5, pair),
    "longt5": Architecture(
        "FlaxLongT5ForConditionalGeneration",
        "LongT5Config",
        _T5 | {"local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"},
        functools.partial(pair, 32),
    ),
    "whisper": Architecture(
        "FlaxWhisperForConditionalGeneration",
        "WhisperConfig",
        _BART
        | {
            "num_mel_bins": 8,
            "max_source_positions": SEQUENCE,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "dropout": 0.1,
        },
        spectrogram,
    ),
    "mistral": Architecture("FlaxMistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 8}),
    "distilbert": Architecture(
        "FlaxDistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "vocab_size": VOCAB,
            "max_position_embeddings": 32,
        },
    ),
    "regnet": Architecture(
        "FlaxRegNetForImageClassification", "RegNetConfig", _CNN | {"groups_width": 8, "layer_type": "y"}, image
    ),
    "mbart": Architecture("FlaxMBartForConditionalGeneration", "MBartConfig", _BART, pair),
    "opt": Architecture(
        "FlaxOPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "vocab_size": VOCAB,
            "max_position_embeddings": 32,
        },
    ),
    "xlm-roberta": Architecture("FlaxXLMRobertaForMaskedLM", "XLMRobertaConfig", _BERT),
    "big-bird": Architecture(
        "FlaxBigBirdForMaskedLM",
        "BigBirdConfig",
        _BERT | {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 64},
        functools.partial(text, 64),
    ),
    "wav2vec2": Architecture(
        "FlaxWav2Vec2ForCTC",
        "Wav2Vec2Config",
        _BERT
        | {
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "feat_extract_norm": "layer",
            "do_stable_layer_norm": True,
            "mask_time_prob": 0.0,
        },
        sound,
        align,
    ),
    "pegasus": Architecture("FlaxPegasusForConditionalGeneration", "PegasusConfig", _BART, pair),
    "marian": Architecture(
        "FlaxMarianMTModel",
        "MarianConfig",
        _BART | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1},
        pair,
    ),
    "dinov2": Architecture("FlaxDinov2ForImageClassification", "Dinov2Config", _VIT, image),
    "blenderbot": Architecture("FlaxBlenderbotForConditionalGeneration", "BlenderbotConfig", _BART, pair),
    # RoFormer is not here: it calls a method of arrays (`split`) that jax 0.10 no longer has
    "bloom": Architecture(
        "FlaxBloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "hidden_dropout": 0.1},
    ),
    "xglm": Architecture(
        "FlaxXGLMForCausalLM",
        "XGLMConfig",
        {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": VOCAB},
    ),
}
