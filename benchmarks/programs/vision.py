"""Vision models: residual and U-shaped convolutions, transformers and mixers on patches."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from programs.training import array, training

BF16 = jnp.bfloat16
CLASSES = 1024


class Bottleneck(nn.Module):
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=BF16)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=BF16)
        h = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        h = nn.relu(norm()(conv(self.channels, (3, 3), (self.stride, self.stride))(h)))
        h = norm()(conv(4 * self.channels, (1, 1))(h))
        if x.shape != h.shape:
            x = norm()(conv(4 * self.channels, (1, 1), (self.stride, self.stride))(x))
        return nn.relu(x + h)


class ResNet(nn.Module):
    """ResNet with bottlenecks, two to a stage."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=BF16)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=BF16)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for k, channels in enumerate((64, 128, 256, 512)):
            for j in range(2):
                x = Bottleneck(channels, 2 if k and not j else 1)(x)
        return nn.Dense(CLASSES, dtype=BF16)(x.mean((1, 2))).astype(jnp.float32)


class ViTLayer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=BF16)(nn.LayerNorm(dtype=BF16)(x)))
        return x + nn.Dense(x.shape[-1], dtype=BF16)(h), None


class ViT(nn.Module):
    layers: int
    width: int
    scan: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (16, 16), (16, 16), "VALID", dtype=BF16)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        places = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + places.astype(BF16)
        heads = self.width // 64
        if self.scan:
            layers = nn.scan(ViTLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = layers(heads, name="layers")(x, None)
        else:
            for _ in range(self.layers):
                x, _ = ViTLayer(heads)(x)
        x = nn.LayerNorm(dtype=BF16)(x).mean(1)
        return nn.Dense(CLASSES, dtype=BF16)(x).astype(jnp.float32)


class UNet(nn.Module):
    """Down by strides, up by resizing, skips joined."""

    @nn.compact
    def __call__(self, x):
        def block(x, channels):
            for _ in range(2):
                x = nn.Conv(channels, (3, 3), dtype=BF16)(x)
                x = nn.silu(nn.GroupNorm(num_groups=8, dtype=BF16)(x))
            return x

        skips, shape = [], x.shape
        for channels in (64, 128, 256):
            x = block(x, channels)
            skips.append(x)
            x = nn.Conv(channels, (3, 3), (2, 2), dtype=BF16)(x)
        x = block(x, 512)
        for skip in reversed(skips):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = block(jnp.concatenate([x, skip], -1), skip.shape[-1])
        return nn.Conv(shape[-1], (1, 1), dtype=BF16)(x).astype(jnp.float32)


class ConvNeXt(nn.Module):
    """Depthwise 7 x 7, then a pointwise MLP with a scale per channel."""

    @nn.compact
    def __call__(self, x):
        for k, channels in enumerate((128, 256, 512)):
            size = 4 if k == 0 else 2
            x = nn.LayerNorm(dtype=BF16)(nn.Conv(channels, (size, size), (size, size), dtype=BF16)(x))
            for j in range(2):
                h = nn.Conv(channels, (7, 7), feature_group_count=channels, dtype=BF16)(x)
                h = nn.gelu(nn.Dense(4 * channels, dtype=BF16)(nn.LayerNorm(dtype=BF16)(h)))
                scale = self.param(f"scale{k}_{j}", nn.initializers.constant(1e-6), (channels,))
                x = x + nn.Dense(channels, dtype=BF16)(h) * scale.astype(BF16)
        return nn.Dense(CLASSES, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x.mean((1, 2)))).astype(jnp.float32)


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(1024, (16, 16), (16, 16), "VALID", dtype=BF16)(x)
        x = x.reshape(x.shape[0], -1, 1024)

        def mlp(h, hidden):
            out = h.shape[-1]
            return nn.Dense(out, dtype=BF16)(nn.gelu(nn.Dense(hidden, dtype=BF16)(h)))

        for _ in range(4):
            h = nn.LayerNorm(dtype=BF16)(x).swapaxes(1, 2)
            x = x + mlp(h, 512).swapaxes(1, 2)
            x = x + mlp(nn.LayerNorm(dtype=BF16)(x), 4096)
        return nn.Dense(CLASSES, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x).mean(1)).astype(jnp.float32)


def _classifier(model: nn.Module, batch: int, size: int):
    return training(model, {"x": array(batch, size, size, 3, dtype=BF16), "y": array(batch)})


def unet():
    image = array(128, 128, 128, 8, dtype=BF16)

    def loss_of(out, wanted):
        return jnp.mean((out - wanted.astype(jnp.float32)) ** 2)

    return training(UNet(), {"x": image, "y": image}, loss_of)


PROGRAMS = {
    "resnet": lambda: _classifier(ResNet(), 1024, 224),
    "vit": lambda: _classifier(ViT(4, 1024, False), 2048, 224),
    "unet": unet,
    "vit_scan": lambda: _classifier(ViT(6, 768, True), 1024, 256),
    "convnext": lambda: _classifier(ConvNeXt(), 1024, 128),
    "mixer": lambda: _classifier(Mixer(), 2048, 224),
}
