"""Models of further packages, linen and nnx, tiny, with random weights; each package only where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

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
    random_like,
    tokens,
    training,
)


def of_nnx(model: nnx.Module, forward: Callable[[Any, dict[str, Any]], Any], batch: dict[str, np.ndarray]) -> Training:
    """Trains an nnx module, split into parameters and everything else (running statistics, streams of keys).

    The parameters are plain arrays by path: some modules carry metadata for a mesh of their own (`fsdp`, `tp`), which
    are pins and refused on another mesh.
    """
    graph, params, others = nnx.split(model, nnx.Param, ...)
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    order = list(arrays)

    def loss(params: Any, extra: Any, batch: dict[str, Any], key: Any) -> tuple[Any, Any]:
        state = jax.tree.unflatten(tree, [params[path] for path in order])
        module = nnx.merge(graph, state, extra, copy=True)  # streams of keys are counted up in place
        value = cross_entropy(forward(module, batch), batch["labels"])
        return value, nnx.state(module, nnx.Not(nnx.Param))

    return training(loss, arrays, batch, others)


def of_linen(
    module: nn.Module, forward: Callable[[Any, Any, dict[str, Any], Any], Any], batch: dict[str, np.ndarray]
) -> Training:
    """Trains a linen module; `forward(module, variables, batch, key)` gives (loss, new variables beside parameters)."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(random_like(jax.eval_shape(lambda: module.init(keys, **inputs))))
    params = variables.pop("params")

    def loss(params: Any, extra: Any, batch: dict[str, Any], key: Any) -> tuple[Any, Any]:
        return forward(module, {"params": params, **extra}, batch, key)

    return training(loss, params, batch, variables)


def classes() -> np.ndarray:
    return tokens(BATCH, high=CLASSES, low=0)


def dantinox(**options: Any) -> Training:
    """Transformer of the `dantinox` package (nnx); `options` choose its attention and feed-forward parts."""
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer

    config = ModelConfig(
        dim=32, n_heads=4, head_size=8, num_blocks=2, vocab_size=VOCAB, max_context=SEQUENCE, dropout=0.1, **options
    )
    batch = {"x": tokens(BATCH, SEQUENCE), "labels": tokens(BATCH, SEQUENCE)}
    return of_nnx(Transformer(config, rngs=nnx.Rngs(0)), lambda model, b: model(b["x"]).logits, batch)


def vitax() -> Training:
    """Vision transformer of the `vitax` package (nnx)."""
    from vitax.models.vit import VisionTransformer

    with nnx.use_eager_sharding(False):  # its parameters are annotated with mesh axes of its own
        model = VisionTransformer(
            num_classes=CLASSES,
            img_size=IMAGE,
            patch_size=8,
            num_layers=2,
            num_heads=4,
            mlp_dim=64,
            hidden_size=32,
            dropout_rate=0.1,
            rngs=nnx.Rngs(0),
        )
    return of_nnx(model, lambda model, b: model(b["x"]), {"x": floats(BATCH, IMAGE, IMAGE, 3), "labels": classes()})


def tunix(family: str, **options: Any) -> Training:
    """A language model of `google-tunix` (nnx)."""
    import importlib

    module = importlib.import_module(f"tunix.models.{family}.model")
    config = module.ModelConfig(**options)
    model = getattr(module, next(n for n in ("Llama3", "Qwen3", "Qwen2", "Gemma3", "Gemma") if hasattr(module, n)))(
        config, rngs=nnx.Rngs(0)
    )
    positions = np.broadcast_to(np.arange(SEQUENCE, dtype=np.int32), (BATCH, SEQUENCE))
    mask = np.broadcast_to(np.tril(np.ones((SEQUENCE, SEQUENCE), bool)), (BATCH, SEQUENCE, SEQUENCE))
    batch = {
        "x": tokens(BATCH, SEQUENCE),
        "positions": np.ascontiguousarray(positions),
        "mask": np.ascontiguousarray(mask),
        "labels": tokens(BATCH, SEQUENCE),
    }
    return of_nnx(model, lambda model, b: model(b["x"], b["positions"], None, b["mask"])[0], batch)


def flaxdiff() -> Training:
    """Text-conditioned denoising U-Net of `flaxdiff` (linen)."""
    from flaxdiff.models.simple_unet import Unet

    attention = {"heads": 4, "dtype": float_type(), "use_projection": False, "use_self_and_cross": True}
    module = Unet(
        output_channels=3,
        emb_features=32,
        feature_depths=(16, 32),
        attention_configs=(None, attention),
        num_res_blocks=1,
        norm_groups=8,
        dtype=float_type(),
    )

    def forward(module: Any, variables: Any, batch: dict[str, Any], key: Any) -> tuple[Any, Any]:
        out = module.apply(variables, batch["x"], batch["temb"], batch["textcontext"])
        return ((out - batch["labels"]) ** 2).mean(), {}

    batch = {
        "x": floats(BATCH, 16, 16, 3),
        "temb": floats(BATCH),
        "textcontext": floats(BATCH, 8, 16),
        "labels": floats(BATCH, 16, 16, 3),
    }
    return of_linen(module, forward, batch)


def flaxmodels_resnet() -> Training:
    """ResNet-18 of `flaxmodels` (linen)."""
    from flaxmodels import resnet

    module = resnet.ResNet18(output="logits", pretrained=None, num_classes=CLASSES, normalize=False, dtype="float32")

    def forward(module: Any, variables: Any, batch: dict[str, Any], key: Any) -> tuple[Any, Any]:
        logits, new = module.apply(variables, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["labels"]), dict(new)

    return of_linen(module, forward, {"x": floats(BATCH, IMAGE, IMAGE, 3), "labels": classes()})


_LLAMA = {
    "num_layers": 2,
    "vocab_size": VOCAB,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-6,
}

MODELS: dict[str, Callable[[], Training]] = {
    "dantinox": dantinox,
    "dantinox-gqa": lambda: dantinox(attention="gqa", kv_heads=2),
    "dantinox-mla-moe": lambda: dantinox(attention="mla", ffn="moe", down_dim_q=16, down_dim_kv=16, rope_dim=8),
    "vitax": vitax,
    "tunix-qwen3": lambda: tunix("qwen3", **_LLAMA),
    "tunix-llama3": lambda: tunix("llama3", **_LLAMA),
    "flaxdiff-unet": flaxdiff,
    "flaxmodels-resnet18": flaxmodels_resnet,
}
